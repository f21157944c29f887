package simulated

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
)

// IsStandIn reports whether the arguments of this program are those of machines:
// "sandbox stand-in ...". They are internal.
func IsStandIn(args []string) bool {
	return len(args) > 2 && args[0] == "sandbox" && args[1] == "stand-in"
}

// Main runs this program as a machine, or as one of the stand-ins on it, and returns its
// exit code.
func Main(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	switch what, rest := args[2], args[3:]; {
	case what == "machine" && len(rest) == 1:
		log := slog.New(slog.NewTextHandler(os.Stderr, nil))
		err = Run(ctx, rest[0], os.Stdin, log)
	case what == "systemctl":
		err = Systemctl(ctx, rest)
	case what == "kubeadm" && len(rest) > 0:
		return Kubeadm(ctx, rest[0], rest[1:], os.Stdout, os.Stderr)
	default:
		err = fmt.Errorf("there is no stand-in %q", what)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
