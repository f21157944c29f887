package enrol

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"constellation/engine/attestation"
	"constellation/engine/attestation/authority"
	"constellation/engine/plan"
	"constellation/engine/sshhost"
)

// identityMachine runs the verbs of `bootstrapper identity` in this process, on a folder of its own.
type identityMachine struct {
	dir   string
	calls []string
	cut   string // the verb whose answer is lost
	noise string // of a startup file of the shell
}

func (m *identityMachine) Target() sshhost.Target {
	return sshhost.Target{User: "root", Host: "10.0.0.11"}
}

func (m *identityMachine) Upload(context.Context, string, fs.FileMode, int64, io.Reader) error {
	return errors.New("nothing is uploaded")
}

func (m *identityMachine) Run(ctx context.Context, c sshhost.Command) (sshhost.Result, error) {
	verb := c.Argv[len(c.Argv)-1]
	m.calls = append(m.calls, verb)
	in, err := io.ReadAll(c.Stdin)
	if err != nil {
		return sshhost.Result{}, err
	}
	var out []byte
	switch verb {
	case "request":
		out, _, err = attestation.RequestIdentity(ctx, m.dir, attestation.NoTPM)
	case "answer":
		out, err = attestation.AnswerIdentity(ctx, m.dir, in)
	case "store":
		var id attestation.EnrolledIdentity
		if id, err = attestation.StoreIdentity(ctx, m.dir, in); err == nil {
			out, err = json.Marshal(id)
		}
	default:
		err = errors.New("unknown verb " + verb)
	}
	if err != nil {
		return sshhost.Result{Exit: 1, Stderr: []byte(err.Error())}, nil
	}
	if verb == m.cut {
		return sshhost.Result{}, sshhost.ErrLost
	}
	return sshhost.Result{Stdout: append([]byte(m.noise), out...)}, nil
}

// TestIdentify loses the answer of each verb once. The next run certifies the same key.
func TestIdentify(t *testing.T) {
	t.Parallel()
	cert, key, err := authority.Create("test")
	if err != nil {
		t.Fatal(err)
	}
	a, err := authority.Parse(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	id := attestation.Identity{Name: "worker-1", ProviderID: "machines://u/worker-1", UID: "u", Group: "machines://u/worker", Role: "worker", IP: netip.MustParseAddr("10.0.0.11")}
	for _, cut := range []string{"", "request", "answer", "store"} {
		m := &identityMachine{dir: filepath.Join(t.TempDir(), "identity"), cut: cut}
		if err := Identify(t.Context(), m, a, id); (cut != "") != errors.Is(err, sshhost.ErrLost) {
			t.Errorf("cut at %q: %v", cut, err)
		}
		m.cut, m.noise = "", "Welcome!\n"
		if err := Identify(t.Context(), m, a, id); err != nil {
			t.Errorf("after a cut at %q: %v", cut, err)
		}
	}
	broken := &identityMachine{dir: filepath.Join(t.TempDir(), "identity"), noise: "{\x1b[2J"}
	if err := Identify(t.Context(), broken, a, id); err == nil || plan.Remedy(err) == "" || bytes.ContainsRune([]byte(err.Error()), 0x1b) || strings.Join(broken.calls, " ") != "request" {
		t.Errorf("a malformed request: %v after %q", err, broken.calls)
	}
}
