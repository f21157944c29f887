package joinservice

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/tools/cache"

	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/revocation"
)

// A revoked machine gets no ticket, whatever it proves. It is refused three times:
//
//   - Connections from its address are closed before the TLS handshake, as long as the
//     cloud lists the machine. Afterwards the cloud may give the address to another one.
//   - A ticket is refused if the record, as seen last, contains its name or its key. Another
//     machine that got the name of a revoked one is refused until the record expires, and
//     its address is not closed.
//   - After the token was written the record is read again. The console writes the record
//     before it deletes the token, so a token never outlives a revocation: either this
//     read contains the entry, or the console's delete comes after our write.

// revokedError means that a machine was revoked. It never joins again.
type revokedError struct{ node string }

func (e *revokedError) Error() string {
	return fmt.Sprintf("this machine was revoked: ConfigMap %s/%s has an entry %s", revocation.Namespace, revocation.ConfigMap, e.node)
}

// revokedNameError means that an earlier machine of this name was revoked. Its certificates
// prove the name, so no other machine can use the name until they have expired.
type revokedNameError struct {
	node  string
	until time.Time // zero: no end is recorded
}

func (e *revokedNameError) Error() string {
	text := fmt.Sprintf("an earlier machine called %s was revoked, and its certificates have not expired", e.node)
	if !e.until.IsZero() {
		text += "; the name can be used again after " + e.until.UTC().Format(time.RFC3339)
	}
	return text
}

// refusal returns why the record refuses a machine; nil: it does not.
func refusal(list revocation.List, id attestation.Identity) error {
	if node, revoked := list.Revoked(id.Name, id.ProviderID); revoked {
		return &revokedError{node}
	}
	if node, refused := list.Refuses(id.Name, id.ProviderID); refused {
		return &revokedNameError{node, list[node].Until}
	}
	return nil
}

// revokedNodes keeps the record in a store and signals its changes on changed.
func (k *kube) revokedNodes() (store cache.Store, changed chan struct{}) {
	changed = make(chan struct{}, 1)
	notify := func() {
		select {
		case changed <- struct{}{}:
		default: // the reader has not seen the last change yet, and will read this one too
		}
	}
	store, controller := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.NewListWatchFromClient(k.core.RESTClient(), "configmaps", revocation.Namespace, fields.OneTermEqualSelector("metadata.name", revocation.ConfigMap)),
		ObjectType:    &corev1.ConfigMap{},
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    func(any) { notify() },
			UpdateFunc: func(any, any) { notify() },
			DeleteFunc: func(any) { notify() },
		},
	})
	k.watches = append(k.watches, controller)
	return store, changed
}

// revokedSeen returns the record as it was seen last. A damaged entry still refuses its
// name.
func (k *kube) revokedSeen() revocation.List {
	obj, ok, err := k.revoked.GetByKey(revocation.Namespace + "/" + revocation.ConfigMap)
	if err != nil || !ok {
		return nil
	}
	list, _ := revocation.Parse(obj.(*corev1.ConfigMap).Data) // damaged entries are in the list
	return list
}

// allowed returns a *revokedError or a *revokedNameError if the record, as seen last,
// refuses the machine.
func (k *kube) allowed(id attestation.Identity) error { return refusal(k.revokedSeen(), id) }

// allowedNow is allowed with a record that is read after the call began.
func (k *kube) allowedNow(ctx context.Context, id attestation.Identity) error {
	list, err := k.record.read(ctx, func(ctx context.Context) (revocation.List, error) {
		cm, err := k.core.ConfigMaps(revocation.Namespace).Get(ctx, revocation.ConfigMap, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read ConfigMap %s: %w", revocation.ConfigMap, err)
		}
		list, _ := revocation.Parse(cm.Data) // damaged entries are in the list
		return list, nil
	})
	if err != nil {
		return err
	}
	return refusal(list, id)
}

// reads shares reads of one object among callers. Each caller gets the answer to a
// request that was sent after it called, so many callers at once cost two requests.
//
// The zero value is ready. It is safe for concurrent use.
type reads struct {
	mu sync.Mutex
	// sent is the last request; next is the one that begins after it, nil if no caller
	// waits for it.
	sent, next *oneRead
}

type oneRead struct {
	done chan struct{}
	list revocation.List
	err  error
}

func (r *reads) read(ctx context.Context, get func(context.Context) (revocation.List, error)) (revocation.List, error) {
	r.mu.Lock()
	mine := r.next
	if mine == nil {
		mine = &oneRead{done: make(chan struct{})}
		before := r.sent
		r.next = mine
		// The caller's end must not fail the others, so the request has its own deadline.
		detached := context.WithoutCancel(ctx)
		go func() {
			if before != nil {
				<-before.done
			}
			r.mu.Lock()
			r.sent, r.next = mine, nil
			r.mu.Unlock()
			ctx, cancel := context.WithTimeout(detached, ticketTimeout/2)
			defer cancel()
			mine.list, mine.err = get(ctx)
			close(mine.done)
		}()
	}
	r.mu.Unlock()
	select {
	case <-mine.done:
		return mine.list, mine.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// confirm deletes the token of a machine that was revoked while its ticket was made.
func (s *Server) confirm(ctx context.Context, log *slog.Logger, id attestation.Identity) error {
	err := s.kube.allowedNow(ctx, id)
	if err == nil {
		return nil
	}
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), ticketTimeout/2)
	defer cancel()
	if failed := s.kube.deleteToken(limited, id.Name); failed != nil {
		log.Warn("token of a refused machine not deleted", "err", failed, "expires_in", tokenTTL)
	}
	return err
}

// sourcesEvery is how often the cloud is asked whether revoked machines are gone, so
// that their addresses are free for others.
const sourcesEvery = 15 * time.Second

// revocationKey identifies a revocation, because a name can be revoked twice.
func revocationKey(node string, e revocation.Entry) string { return node + " " + e.Since.String() }

// watchSources keeps the refused addresses up to date until ctx ends.
func (s *Server) watchSources(ctx context.Context) {
	gone := map[string]bool{} // revocations whose machines the cloud has ceased to list
	for {
		list := s.kube.revokedSeen()
		left, again := false, (<-chan time.Time)(nil)
		if addresses := s.sourcesOf(ctx, list, gone); len(addresses) > 0 {
			if old := s.sources.Swap(&addresses); old == nil || !maps.Equal(*old, addresses) {
				s.log.Info("revoked addresses refused", "addresses", fmt.Sprint(addresses))
			}
		} else if s.sources.Swap(nil) != nil {
			s.log.Info("no revoked address is left")
		}
		for node, e := range list {
			left = left || !gone[revocationKey(node, e)]
		}
		if left {
			again = time.After(sourcesEvery) // also if the cloud has not answered, or knows no address yet
		}
		select {
		case <-ctx.Done():
			return
		case <-s.kube.revokedChanged:
		case <-again:
		}
	}
}

// sourcesOf returns the addresses of the revoked machines that may still exist, with the
// names of their nodes. The cloud decides which machine has which address: a Node could
// claim that of an honest one. While the cloud does not answer, its last answer counts, and
// the record for machines that were not in it.
func (s *Server) sourcesOf(ctx context.Context, list revocation.List, gone map[string]bool) map[netip.Addr]string {
	out := map[netip.Addr]string{}
	key := func(node string) string { return revocationKey(node, list[node]) }
	if !slices.ContainsFunc(slices.Collect(maps.Keys(list)), func(node string) bool { return !gone[key(node)] }) {
		return out
	}
	limited, cancel := context.WithTimeout(ctx, ticketTimeout/2)
	defer cancel()
	all, err := s.meta.Peers(limited)
	if err != nil {
		kept := map[string]bool{}
		if last := s.sources.Load(); last != nil {
			for a, node := range *last {
				if _, revoked := list[node]; revoked && !gone[key(node)] {
					out[a], kept[node] = node, true
				}
			}
		}
		for node, e := range list {
			if a, err := netip.ParseAddr(e.Address); err == nil && !gone[key(node)] && !kept[node] {
				out[a.Unmap()] = node
			}
		}
		return out
	}
	exists := map[string]bool{}
	for _, i := range all {
		if node, revoked := list.Revoked(i.Name, i.Key()); revoked && i.State != cloud.Terminated {
			exists[node] = true
			if i.IP.IsValid() {
				out[i.IP.Unmap()] = node
			}
		}
	}
	for node := range list {
		if !exists[node] {
			gone[key(node)] = true
		}
	}
	return out
}

// sourceFilter closes connections from the addresses of revoked machines.
type sourceFilter struct {
	net.Listener
	s *Server
}

// Accept implements [net.Listener].
func (f sourceFilter) Accept() (net.Conn, error) {
	for {
		conn, err := f.Listener.Accept()
		if err != nil {
			return nil, err
		}
		node, refused := f.s.revokedSource(conn.RemoteAddr())
		if !refused {
			return conn, nil
		}
		_ = conn.Close() // there is nothing to tell a machine that was revoked
		f.s.refused(conn.RemoteAddr(), &revokedError{node})
	}
}

func (s *Server) revokedSource(peer net.Addr) (node string, refused bool) {
	addresses := s.sources.Load()
	tcp, ok := peer.(*net.TCPAddr)
	if addresses == nil || !ok {
		return "", false
	}
	node, refused = (*addresses)[tcp.AddrPort().Addr().Unmap().WithZone("")]
	return node, refused
}
