package bootstrapper

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"

	"constellation/engine/attestation"
	"constellation/internal/journal"
)

const holderFile = "node.json"

// States and claimants of a node, as stored on disk.
const (
	claimed = "claimed"
	member  = "member"

	byInit = "init"
	byJoin = "join"
)

// holder is the permanent claimant of the node.
type holder struct {
	State string `json:"state"`
	By    string `json:"by"`
	// ClusterID is hex.
	ClusterID string    `json:"clusterID"`
	Time      time.Time `json:"time"`
	// Node is the name of a member, if its claimant provided it.
	Node string `json:"node,omitempty"`
	// Failure is why the claimant failed permanently; "" while it can succeed.
	Failure string `json:"failure,omitempty"`
	// Retry is whether the claimant may try again after its Failure: nothing of a cluster is on
	// the machine yet.
	Retry bool `json:"retry,omitempty"`
}

// registers is the part of the TPM that the lock uses.
type registers interface {
	// read returns SHA-256 registers.
	read(ctx context.Context, indices ...uint32) (map[uint32][]byte, error)
	// extend marks the machine as a member of the cluster. Repeating it changes nothing; for
	// another cluster it fails.
	extend(ctx context.Context, clusterID []byte) error
	// survives is whether register 15 is a file, which no restart of the machine clears.
	survives() bool
	// clear makes a machine unused whose register 15 survives.
	clear() error
}

// tpm is the address of a TPM, or of the enrolled identity of a machine.
type tpm string

func (t tpm) read(ctx context.Context, indices ...uint32) (map[uint32][]byte, error) {
	return attestation.ReadPCRs(ctx, string(t), indices...)
}

func (t tpm) extend(ctx context.Context, clusterID []byte) error {
	return attestation.ExtendClusterID(ctx, string(t), clusterID)
}

func (t tpm) survives() bool { return attestation.SoftwareMembership(string(t)) }

func (t tpm) clear() error { return attestation.ClearClusterID(string(t)) }

// clusterRegister is the register that carries the cluster ID.
const clusterRegister = 15

// Reasons why a claim fails.
var (
	errJoinHolds   = errors.New("the machine is joining a cluster")
	errMember      = errors.New("the machine is a node of a cluster already")
	errOtherHolder = errors.New("the machine was claimed for another cluster")
)

// lock decides which claimant gets the node. It is safe for concurrent use; between processes
// the link of its file decides.
type lock struct {
	state *os.Root
	tpm   registers

	mu     sync.Mutex
	now    *holder       // nil: free
	byInit chan struct{} // closed when an init has claimed the node
}

// openLock reads the claimant and verifies that the TPM agrees.
func openLock(ctx context.Context, state *os.Root, t registers) (*lock, error) {
	l := &lock{state: state, tpm: t, byInit: make(chan struct{})}
	// Left by processes that died before the link.
	stale, err := fs.Glob(state.FS(), holderFile+".*")
	if err == nil && len(stale) > 0 {
		err = removeAll(state, stale...)
	}
	if err != nil {
		return nil, fmt.Errorf("read claim of the node: %w", err)
	}
	h, err := readHolder(state)
	if err != nil {
		return nil, err
	}
	if h != nil {
		l.set(h)
	}
	pcr, err := l.register(ctx)
	if err != nil {
		return nil, err
	}
	switch zero := len(bytes.Trim(pcr, "\x00")) == 0; {
	case zero:
	case h == nil:
		remedy := "restart the machine"
		if t.survives() {
			remedy = "run `bootstrapper reset` on it"
		}
		return nil, fmt.Errorf("%w: register 15 contains a cluster's ID, but the disk has no claim; %s to use it again, or replace it", ErrStuck, remedy)
	case !bytes.Equal(pcr, attestation.ClusterIDPCR(h.clusterID())):
		return nil, fmt.Errorf("%w: register 15 and the claim on its disk name different clusters; replace the machine", ErrStuck)
	}
	return l, nil
}

// readHolder returns nil if the node is free.
func readHolder(state *os.Root) (*holder, error) {
	b, err := state.ReadFile(holderFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read claim of the node: %w", err)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	var h holder
	err = d.Decode(&h)
	if err == nil && (h.State != claimed && h.State != member || h.By != byInit && h.By != byJoin || len(h.clusterID()) == 0) {
		err = errors.New("a field has an invalid value")
	}
	if err != nil {
		// Its file is written atomically: this is disk corruption or tampering.
		return nil, fmt.Errorf("%w: %s is damaged (%w); `bootstrapper reset` and a reboot make the machine unused", ErrStuck, holderFile, err)
	}
	return &h, nil
}

func (h holder) clusterID() []byte {
	b, err := hex.DecodeString(h.ClusterID)
	if err != nil {
		return nil
	}
	return b
}

// holder returns the claimant of the node; false if it is free.
func (l *lock) holder() (holder, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.now == nil {
		return holder{}, false
	}
	return *l.now, true
}

// set makes h the claimant in memory. The caller holds mu, or has exclusive access to l.
func (l *lock) set(h *holder) {
	if l.now == nil && h.By == byInit {
		close(l.byInit)
	}
	l.now = h
}

// take claims the node on disk, for one claimant and cluster; the first one has it
// permanently. Repeating a successful claim succeeds. It does not extend register 15: see
// seal.
func (l *lock) take(by string, clusterID []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.now == nil {
		h := &holder{State: claimed, By: by, ClusterID: hex.EncodeToString(clusterID), Time: time.Now().UTC()}
		won, err := createOnce(l.state, holderFile, h)
		if err != nil {
			return fmt.Errorf("claim the node: %w", err)
		}
		if !won { // another process was first
			if h, err = readHolder(l.state); err != nil {
				return err
			}
			if h == nil {
				return errors.New("claim the node: its file changes concurrently")
			}
		}
		l.set(h)
	}
	switch h := l.now; {
	case h.State == member:
		return errMember
	case h.By != by && h.By == byInit:
		return errClaimed
	case h.By != by:
		return errJoinHolds
	case !bytes.Equal(h.clusterID(), clusterID):
		return errOtherHolder
	}
	return nil
}

// seal extends register 15 with the claimant's cluster. Repeating it changes nothing. It fails
// without a claim.
func (l *lock) seal(ctx context.Context) error {
	h, held := l.holder()
	if !held {
		return errors.New("extend register 15: the node is not claimed")
	}
	if err := l.tpm.extend(ctx, h.clusterID()); err != nil {
		return fmt.Errorf("extend register 15: %w", err)
	}
	return nil
}

// unsealed reports whether register 15 is zero, as it is after a boot.
func (l *lock) unsealed(ctx context.Context) (bool, error) {
	pcr, err := l.register(ctx)
	return len(bytes.Trim(pcr, "\x00")) == 0, err
}

func (l *lock) register(ctx context.Context) ([]byte, error) {
	pcrs, err := l.tpm.read(ctx, clusterRegister)
	if err != nil {
		return nil, fmt.Errorf("read register 15: %w", err)
	}
	return pcrs[clusterRegister], nil
}

// finish records that the node, called name, is a member.
func (l *lock) finish(name string) error {
	return l.change("record the membership", func(h *holder) { h.State, h.Node, h.Failure, h.Retry = member, name, "", false })
}

// fail records why the claimant gave up, and whether it may retry.
func (l *lock) fail(why string, retry bool) error {
	return l.change("record the failure", func(h *holder) {
		if h.State == claimed {
			h.Failure, h.Retry = why, retry
		}
	})
}

// retry records that the claimant tries again.
func (l *lock) retry() error {
	return l.change("clear the failure", func(h *holder) {
		if h.State == claimed && h.Retry {
			h.Failure, h.Retry = "", false
		}
	})
}

func (l *lock) change(what string, f func(*holder)) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.now == nil {
		return fmt.Errorf("%s: the node is not claimed", what)
	}
	h := *l.now
	f(&h)
	b, err := json.Marshal(h)
	if err == nil {
		err = replaceFile(l.state, holderFile, b, 0o600)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	l.now = &h
	return nil
}

// ClaimJoin implements nodeLock.
func (l *lock) ClaimJoin(ctx context.Context, clusterID []byte) error {
	if err := l.take(byJoin, clusterID); err != nil {
		return err
	}
	return l.seal(ctx)
}

// Joined implements nodeLock.
func (l *lock) Joined(_ context.Context, name string) error { return l.finish(name) }

// Claimed implements nodeLock.
func (l *lock) Claimed() <-chan struct{} { return l.byInit }

// createOnce writes v as name if there is no such file. It reports whether it did: one of
// several concurrent calls does.
func createOnce(dir *os.Root, name string, v any) (bool, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return false, err
	}
	suffix, err := randomBytes(8)
	if err != nil {
		return false, err
	}
	temp := name + "." + hex.EncodeToString(suffix)
	if err := replaceFile(dir, temp, b, 0o600); err != nil {
		return false, err
	}
	err = dir.Link(temp, name)
	if e := dir.Remove(temp); err == nil {
		err = e
	}
	if errors.Is(err, fs.ErrExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, journal.SyncDir(dir)
}
