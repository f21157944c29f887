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
)

const holderFile = "node.json"

// States and claimants of a node, as they are on disk.
const (
	claimed = "claimed"
	member  = "member"

	byInit = "init"
	byJoin = "join"
)

// holder is who has the node, once and for ever.
type holder struct {
	State string `json:"state"`
	By    string `json:"by"`
	// ClusterID is hex.
	ClusterID string    `json:"clusterID"`
	Time      time.Time `json:"time"`
	// Node is the name of a member, as far as its claimant told it.
	Node string `json:"node,omitempty"`
	// Failure is why the claimant will not make the node a member; "" while it may.
	Failure string `json:"failure,omitempty"`
	// Retry says that the claimant may try again after its Failure: there is nothing of
	// a cluster on the machine yet.
	Retry bool `json:"retry,omitempty"`
}

// registers is what the lock needs of the TPM.
type registers interface {
	// read returns SHA-256 registers.
	read(ctx context.Context, indices ...uint32) (map[uint32][]byte, error)
	// extend marks the machine as a member of the cluster. Repeating it changes
	// nothing; for another cluster it fails.
	extend(ctx context.Context, clusterID []byte) error
}

// tpm is the address of a TPM.
type tpm string

func (t tpm) read(ctx context.Context, indices ...uint32) (map[uint32][]byte, error) {
	return attestation.ReadPCRs(ctx, string(t), indices...)
}

func (t tpm) extend(ctx context.Context, clusterID []byte) error {
	return attestation.ExtendClusterID(ctx, string(t), clusterID)
}

// clusterRegister is the register that carries the cluster ID.
const clusterRegister = 15

// Who has the node, to those who wanted it.
var (
	errJoinHolds   = errors.New("the machine is joining a cluster")
	errMember      = errors.New("the machine is a node of a cluster already")
	errOtherHolder = errors.New("the machine was claimed for another cluster")
)

// lock decides who gets the node. It is safe for concurrent use; between processes
// the link of its file decides.
type lock struct {
	state *os.Root
	tpm   registers

	mu     sync.Mutex
	now    *holder       // nil: free
	byInit chan struct{} // closed when an init has claimed the node
}

// openLock reads who has the node and checks that the TPM agrees.
func openLock(ctx context.Context, state *os.Root, t registers) (*lock, error) {
	l := &lock{state: state, tpm: t, byInit: make(chan struct{})}
	// What is left of claims whose process died before the link.
	stale, err := fs.Glob(state.FS(), holderFile+".*")
	if err == nil && len(stale) > 0 {
		err = removeAll(state, stale...)
	}
	if err != nil {
		return nil, fmt.Errorf("read who has the node: %w", err)
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
		return nil, fmt.Errorf("%w: register 15 of its TPM says that it belongs to a cluster, and its disk does not know which; restart the machine to use it anew, or replace it", ErrStuck)
	case !bytes.Equal(pcr, attestation.ClusterIDPCR(h.clusterID())):
		return nil, fmt.Errorf("%w: register 15 of its TPM and its disk name different clusters; replace the machine", ErrStuck)
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
		return nil, fmt.Errorf("read who has the node: %w", err)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	var h holder
	err = d.Decode(&h)
	if err == nil && (h.State != claimed && h.State != member || h.By != byInit && h.By != byJoin || len(h.clusterID()) == 0) {
		err = errors.New("a field has a value that it never gets")
	}
	if err != nil {
		// Its file is written whole or not at all: this is rot, or somebody's hand.
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

// holder returns who has the node; false if it is free.
func (l *lock) holder() (holder, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.now == nil {
		return holder{}, false
	}
	return *l.now, true
}

// set makes h the holder in memory. The caller holds mu, or nobody else knows l.
func (l *lock) set(h *holder) {
	if l.now == nil && h.By == byInit {
		close(l.byInit)
	}
	l.now = h
}

// take claims the node on disk, for one claimant and cluster; whoever comes first
// has it for ever. Repeating a claim that succeeded is fine. Register 15 is not
// touched yet: see seal.
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
				return errors.New("claim the node: its file comes and goes")
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

// seal makes register 15 say which cluster the node belongs to. Repeating it changes
// nothing. It fails if nobody has the node.
func (l *lock) seal(ctx context.Context) error {
	h, held := l.holder()
	if !held {
		return errors.New("extend register 15: nobody has claimed the node")
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

// fail records why the claimant gave up, and whether it may try again.
func (l *lock) fail(why string, retry bool) error {
	return l.change("record the failure", func(h *holder) {
		if h.State == claimed {
			h.Failure, h.Retry = why, retry
		}
	})
}

// retry records that the claimant tries again.
func (l *lock) retry() error {
	return l.change("take back the failure", func(h *holder) {
		if h.State == claimed && h.Retry {
			h.Failure, h.Retry = "", false
		}
	})
}

func (l *lock) change(what string, f func(*holder)) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.now == nil {
		return fmt.Errorf("%s: nobody has claimed the node", what)
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

// createOnce writes v as name if there is no such file. It reports whether it did:
// of several that try at once, one does.
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
	return true, syncDir(dir)
}
