package backup

import (
	"bytes"
	"crypto/sha256"
	"hash"
)

// page is what a database of etcd is made of, in bytes, or a part of it.
const page = 512

// etcdEnd checks how etcd ends a snapshot: after the database, which is whole pages,
// comes its SHA-256. `etcdutl snapshot restore` asks for the same.
type etcdEnd struct {
	body hash.Hash
	tail []byte // the last bytes, which may be the hash
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

// wrong says why what was written is no snapshot; empty if it is one.
func (e *etcdEnd) wrong() string {
	switch {
	case e.size%page != sha256.Size || e.size == sha256.Size:
		return "is no snapshot of etcd: it is not a database with its hash"
	case !bytes.Equal(e.body.Sum(nil), e.tail):
		return "is not what etcd's own hash at its end says"
	}
	return ""
}
