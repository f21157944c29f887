package sshhost

// SetPassword makes the host use this password of sudo.
func (h *Host) SetPassword(p []byte) { h.password = p }
