package enrol

// On makes a request work with another folder and lock on the machine.
func (r Request) On(state, lock string) Request {
	r.state, r.lock = state, lock
	return r
}

// On makes machines use another folder for their state.
func (s Sources) On(state string) Sources {
	s.state = state
	return s
}
