package engine

// simulated reports whether the machines of the workspace only do as machines would.
func (e *Engine) simulated() bool {
	s, err := e.ws.State()
	return err == nil && s.Simulated()
}

// notAttested reports whether no evidence of hardware vouches for the machines of the workspace.
func (e *Engine) notAttested() bool {
	s, err := e.ws.State()
	return err == nil && s.NotAttested()
}
