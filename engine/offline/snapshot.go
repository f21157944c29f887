package offline

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/scheme"

	"constellation/engine/backup"
	"constellation/engine/kube/preflight"
	"constellation/engine/manifests"
	"constellation/engine/plan"
)

const (
	// maxKeys bounds the keys of a snapshot; each takes about 200 bytes of memory.
	maxKeys = 5_000_000
	// maxObject bounds one object, in bytes. An API server accepts 3 MiB.
	maxObject = 16 << 20
)

var (
	protobufMark  = []byte("k8s\x00")
	encryptedMark = []byte("k8s:enc:")
)

// counts are what a snapshot has.
type counts struct {
	objects int
	// encrypted are objects that are encrypted at rest, unreadable those that cannot be decoded.
	encrypted, unreadable int
	// releases are what releases of Helm have.
	releases []plan.Finding
}

// readSnapshot adds the objects of an etcd snapshot. Only the latest revision of each key
// counts. Memory holds the keys and one object.
func readSnapshot(ctx context.Context, r io.ReaderAt, size int64, hop manifests.Request, into *preflight.Objects) (c counts, err error) {
	f, err := backup.OpenEtcd(r, size)
	if err != nil {
		return c, fmt.Errorf("read etcd snapshot: %w", err)
	}
	latest := map[string]int64{}
	if _, err := f.Read(ctx, func(e backup.EtcdEntry) error {
		if e.Deleted {
			delete(latest, string(e.Key))
			return nil
		}
		if latest[string(e.Key)] = e.Revision; len(latest) > maxKeys {
			return fmt.Errorf("it has more than %d keys", maxKeys)
		}
		return nil
	}); err != nil {
		return c, fmt.Errorf("read etcd snapshot: %w", err)
	}
	decoder := scheme.Codecs.UniversalDeserializer()
	_, err = f.Read(ctx, func(e backup.EtcdEntry) error {
		if e.Deleted || latest[string(e.Key)] != e.Revision || len(e.Value) == 0 {
			return nil
		}
		switch v := e.Value; {
		case bytes.HasPrefix(v, encryptedMark):
			c.encrypted++
		case len(v) > maxObject:
			c.unreadable++
		case bytes.HasPrefix(v, protobufMark):
			obj, stored, err := decode(decoder, v)
			switch {
			case err == nil:
				c.objects++
				if secret, ok := obj.(*corev1.Secret); ok {
					c.releases = append(c.releases, releaseFindings(secret, hop)...)
				}
				into.Add(obj, *stored)
			case stored != nil && runtime.IsNotRegisteredError(err):
				c.objects++ // a type that this program does not know: its version counts
				into.Stored(*stored, "", "")
			default:
				c.unreadable++
			}
		case v[0] == '{':
			c.objects++
			if into.AddJSON(v) != nil {
				c.objects, c.unreadable = c.objects-1, c.unreadable+1
			}
		}
		// Other values, such as allocated ports of older versions, are no objects.
		return nil
	})
	if err != nil {
		return c, fmt.Errorf("read etcd snapshot: %w", err)
	}
	return c, nil
}

// decode decodes an object of a machine that may be hostile: a panic of the generated code is
// an error.
func decode(d runtime.Decoder, v []byte) (obj runtime.Object, stored *schema.GroupVersionKind, err error) {
	defer func() {
		if recover() != nil {
			obj, stored, err = nil, nil, errors.New("decode object: the data is invalid")
		}
	}()
	return d.Decode(bytes.Clone(v), nil, nil)
}
