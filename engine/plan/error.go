package plan

import (
	"errors"
)

// Exit codes, the same for every verb.
const (
	ExitDone             = 0
	ExitFailed           = 1
	ExitUsage            = 2 // bad usage or configuration
	ExitNothing          = 3 // nothing to do
	ExitBlocked          = 4 // by a finding
	ExitUnacknowledged   = 5 // an acknowledgement is missing
	ExitUpgradeAvailable = 6 // only with `upgrade check --exit-code`
	ExitStopped          = 7 // part-way, can be resumed
	ExitHeld             = 8 // another console holds the run
	ExitDiffers          = 9 // only `backup diff`: the cluster is not as it was
	ExitHungUp           = 129
	ExitInterrupted      = 130
	ExitTerminated       = 143
)

// Error is an error in the user's words.
type Error struct {
	// Op is what was tried: "connect to the first machine at 127.0.0.1:9000".
	Op string
	// Err is why it did not work. It holds no secret.
	Err error
	// Remedy is what the user can do, as a sentence.
	Remedy string
	// Exit is the program's exit code; zero means ExitFailed.
	Exit int
}

// Error returns "op: cause".
func (e *Error) Error() string {
	switch {
	case e.Err == nil:
		return e.Op
	case e.Op == "":
		return e.Err.Error()
	}
	return e.Op + ": " + e.Err.Error()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// ExitCode returns the exit code of err: 0 for nil, that of the first Error in its
// tree, else ExitFailed.
func ExitCode(err error) int {
	if err == nil {
		return ExitDone
	}
	var e *Error
	if errors.As(err, &e) && e.Exit != 0 {
		return e.Exit
	}
	return ExitFailed
}

// Remedy returns what the user can do about err; empty if nobody knows.
func Remedy(err error) string {
	var e *Error
	for errors.As(err, &e) {
		if e.Remedy != "" {
			return e.Remedy
		}
		err = e.Err
	}
	return ""
}
