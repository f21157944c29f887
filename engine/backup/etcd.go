package backup

import (
	"bytes"
	"crypto/sha256"
	"hash"
)

// page is the unit of etcd's database size, in bytes, or a fraction of it.
const page = 512

// etcdEnd verifies the end of an etcd snapshot: after the database, which is a whole number of
// pages, comes its SHA-256. `etcdutl snapshot restore` requires the same.
type etcdEnd struct {
	body hash.Hash
	tail []byte // the last bytes, possibly the hash
	size int64
}

func newEtcdEnd() *etcdEnd { return &etcdEnd{body: sha256.New()} }

func (e *etcdEnd) write(p []byte) {
	e.size += int64(len(p))
	if len(p) >= sha256.Size {
		e.body.Write(e.tail)
		e.body.Write(p[:len(p)-sha256.Size])
		e.tail = append(e.tail[:0], p[len(p)-sha256.Size:]...)
		return
	}
	e.tail = append(e.tail, p...)
	if n := len(e.tail) - sha256.Size; n > 0 {
		e.body.Write(e.tail[:n])
		e.tail = append(e.tail[:0], e.tail[n:]...)
	}
}

// wrong describes why the bytes are not a snapshot; empty if they are one.
func (e *etcdEnd) wrong() string {
	switch {
	case e.size%page != sha256.Size || e.size == sha256.Size:
		return "is not a snapshot of etcd: want a database followed by its hash"
	case !bytes.Equal(e.body.Sum(nil), e.tail):
		return "does not match etcd's hash at its end"
	}
	return ""
}
