package operator

import (
	"context"
	"log/slog"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"constellation/engine/revocation"
	"constellation/operator/decision"
)

// revokedEvery is how often the record of revoked machines is read while a machine has no Node.
const revokedEvery = 30 * time.Second

// revokedWithin bounds that reading: the round waits for it.
const revokedWithin = 5 * time.Second

// revokedNames has the record of revoked machines as last read.
type revokedNames struct {
	list revocation.List
	at   time.Time
	told string // the error that was logged last
}

// read returns the record, or nil if every machine has a Node. After an error the last record counts:
// without it, a refused machine only waits for its join deadline.
func (r *revokedNames) read(ctx context.Context, from client.Reader, w *decision.World, x *decision.Lookup, log *slog.Logger) revocation.List {
	waits := false
	for i := range w.Instances {
		m := &w.Instances[i]
		waits = waits || !decision.Gone(m) && m.Name != "" && x.NodeOf[m.ID] == nil
	}
	if !waits {
		return nil
	}
	if !r.at.IsZero() && w.Now.Sub(r.at) < revokedEvery {
		return r.list
	}
	ctx, cancel := context.WithTimeout(ctx, revokedWithin)
	defer cancel()
	var cm corev1.ConfigMap
	err := from.Get(ctx, client.ObjectKey{Namespace: revocation.Namespace, Name: revocation.ConfigMap}, &cm)
	if err == nil || apierrors.IsNotFound(err) {
		r.list, _ = revocation.Parse(cm.Data) // a damaged entry still refuses its name
		r.told = ""
	} else if r.told != err.Error() {
		r.told = err.Error()
		log.Warn("record of revoked machines not read", "err", err)
	}
	r.at = w.Now
	return r.list
}
