package sandbox

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"constellation/engine/component"
	"constellation/engine/release"
)

// mirrored are the components that machines download. Control plane components
// are images.
var mirrored = []string{"kubeadm", "kubelet", "kubectl"}

// installDir is where a machine keeps its components.
const installDir = "/usr/local/bin"

// mirror serves the Kubernetes binaries that this computer built.
type mirror struct {
	log *slog.Logger
	// base is the URL under which machines reach the mirror.
	base string
	// requested is called with the client's address at each request for a component.
	requested func(remoteAddr string)
	faults    func() *Faults
	// key signs what machines install. It is nil if this sandbox's images have no release keys.
	key *release.PrivateKey

	// agent is the enrolment program for machines of old images; empty if there is none.
	agent binary

	mu       sync.Mutex
	versions map[string]map[string]binary // Kubernetes version → name
}

type binary struct {
	path, digest string
}

// add offers the binaries of a version, given paths and digests by name.
func (m *mirror) add(version string, paths, digests map[string]string) error {
	set := map[string]binary{}
	for _, name := range mirrored {
		b := binary{paths[name], digests[name]}
		if b.path == "" || b.digest == "" {
			return fmt.Errorf("mirror Kubernetes %s: %s is missing", version, name)
		}
		set[name] = b
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.versions == nil {
		m.versions = map[string]map[string]binary{}
	}
	m.versions[version] = set
	return nil
}

// list returns the versions that are served, sorted as text.
func (m *mirror) list() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var vs []string
	for v := range m.versions {
		vs = append(vs, v)
	}
	slices.Sort(vs)
	return vs
}

// components describes a version for installation on a machine; ok is false if
// it is not served.
func (m *mirror) components(version string) (l component.List, ok bool) {
	m.mu.Lock()
	set, ok := m.versions[version]
	m.mu.Unlock()
	if !ok {
		return nil, false
	}
	for _, name := range mirrored {
		l = append(l, component.Component{
			Name:   name,
			URL:    m.base + "/kubernetes/" + version + "/" + name,
			Digest: set[name].digest,
			Path:   path.Join(installDir, name),
			Mode:   0o755,
		})
	}
	return l, true
}

// vouch returns the signed statement over a list of components; empty without a key.
func (m *mirror) vouch(version string, l component.List) (string, error) {
	if m.key == nil || len(l) == 0 {
		return "", nil
	}
	return m.key.Vouch(release.Vouched{version: {runtime.GOARCH: l.Digest()}})
}

// agentPath is the URL path of the enrolment program.
const agentPath = "/agent"

// enrolment describes the enrolment program, which old agents install in place of kubeadm.
// It is nil if there is none.
func (m *mirror) enrolment() *component.Component {
	if m.agent.path == "" {
		return nil
	}
	return &component.Component{Name: "kubeadm", URL: m.base + agentPath, Digest: m.agent.digest, Path: path.Join(installDir, "kubeadm"), Mode: 0o755}
}

// ServeHTTP serves /kubernetes/<version>/<name>, with support for Range.
func (m *mirror) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if req.Method != http.MethodGet && req.Method != http.MethodHead {
		http.Error(w, "read only", http.StatusMethodNotAllowed)
		return
	}
	parts := strings.Split(strings.TrimPrefix(req.URL.Path, "/kubernetes/"), "/")
	var b binary
	if req.URL.Path == agentPath {
		parts, b = []string{"", "agent"}, m.agent
	} else if len(parts) == 2 {
		m.mu.Lock()
		b = m.versions[parts[0]][parts[1]]
		m.mu.Unlock()
	}
	if b.path == "" {
		http.Error(w, "no such component; served are "+strings.Join(m.list(), ", "), http.StatusNotFound)
		return
	}
	if m.requested != nil {
		m.requested(req.RemoteAddr)
	}
	f, err := os.Open(b.path)
	if err != nil {
		m.log.Error("component not served", "component", parts[1], "version", parts[0], "err", err)
		http.Error(w, "the component is gone from the cache", http.StatusInternalServerError)
		return
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		http.Error(w, "the component cannot be read", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("ETag", `"`+b.digest+`"`)
	var content io.ReadSeeker = f
	if m.faults != nil {
		flt, name := m.faults(), parts[1]
		switch {
		case flt.truncate[name]:
			content = io.NewSectionReader(f, 0, info.Size()/2)
		case flt.corrupt[name]:
			content = io.NewSectionReader(flipped{f, info.Size() / 2}, 0, info.Size())
		case flt.cut[name]:
			w = &cutWriter{ResponseWriter: w, left: max(info.Size()/4, 1)}
		}
	}
	http.ServeContent(w, req, "", time.Time{}, content)
}

// flipped reads a file with one byte changed.
type flipped struct {
	f  io.ReaderAt
	at int64
}

func (r flipped) ReadAt(p []byte, off int64) (int, error) {
	n, err := r.f.ReadAt(p, off)
	if i := r.at - off; i >= 0 && i < int64(n) {
		p[i] ^= 0xff
	}
	return n, err
}

// cutWriter closes the connection after a number of bytes.
type cutWriter struct {
	http.ResponseWriter
	left int64
}

func (w *cutWriter) Write(p []byte) (int, error) {
	if int64(len(p)) <= w.left {
		w.left -= int64(len(p))
		return w.ResponseWriter.Write(p)
	}
	_, _ = w.ResponseWriter.Write(p[:w.left]) // the connection closes now, with or without an error
	// net/http handles this value: it closes the connection and logs nothing.
	panic(http.ErrAbortHandler)
}
