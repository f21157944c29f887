//go:build !linux

package agent

import (
	"errors"
	"log/slog"
	"net"
)

// rootOnly refuses everyone: only Linux says who a caller is in the way we ask.
type rootOnly struct {
	net.Listener
	log   *slog.Logger
	slots chan struct{}
}

// Accept always fails.
func (l *rootOnly) Accept() (net.Conn, error) {
	return nil, errors.New("the agent runs on Linux only")
}
