package sandbox

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"
)

// registry serves pulls of container images from OCI archives and layouts on
// disk, for every registry that a machine requests: containerd names it in the parameter
// "ns". It holds no blob in memory and accepts no upload.
type registry struct {
	log *slog.Logger
	// pulled is called with the client's address at each request for a manifest.
	pulled func(remoteAddr string)
	faults func() *Faults

	mu    sync.RWMutex
	refs  map[string]descriptor // "registry.k8s.io/pause:3.10.1"
	blobs map[string]blob       // by digest; manifests too
}

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int64             `json:"size"`
	Annotations map[string]string `json:"annotations"`
}

// blob is the location of bytes: a whole file, or a part of an archive.
type blob struct {
	file         string
	offset, size int64
}

// add offers the image in the OCI layout or archive at file under the name ref.
func (r *registry) add(ref, file string) error {
	blobs, index, err := openImage(file)
	if err != nil {
		return fmt.Errorf("read image %s: %w", file, err)
	}
	d, err := pick(index, ref)
	if err != nil {
		return fmt.Errorf("read image %s: %w", file, err)
	}
	if _, ok := blobs[d.Digest]; !ok {
		return fmt.Errorf("read image %s: it lacks its manifest %s", file, d.Digest)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.refs == nil {
		r.refs, r.blobs = map[string]descriptor{}, map[string]blob{}
	}
	r.refs[normalRef(ref)] = d
	for digest, b := range blobs {
		r.blobs[digest] = b
	}
	return nil
}

// pick finds the manifest called ref in an index, or its only manifest.
func pick(index []descriptor, ref string) (descriptor, error) {
	for _, d := range index {
		for _, key := range []string{"io.containerd.image.name", "org.opencontainers.image.ref.name"} {
			if name := d.Annotations[key]; name != "" && (name == ref || strings.HasSuffix(ref, ":"+name)) {
				return d, nil
			}
		}
	}
	if len(index) != 1 {
		return descriptor{}, fmt.Errorf("%d images, none called %s", len(index), ref)
	}
	return index[0], nil
}

// openImage lists the blobs of an OCI layout, a directory or a tar of one, and
// returns the entries of its index.
func openImage(file string) (map[string]blob, []descriptor, error) {
	blobs := map[string]blob{}
	var index struct {
		Manifests []descriptor `json:"manifests"`
	}
	info, err := os.Stat(file)
	if err != nil {
		return nil, nil, err
	}
	if info.IsDir() {
		b, err := os.ReadFile(filepath.Join(file, "index.json"))
		if err != nil {
			return nil, nil, err
		}
		if err := json.Unmarshal(b, &index); err != nil {
			return nil, nil, fmt.Errorf("decode index.json: %w", err)
		}
		dir := filepath.Join(file, "blobs", "sha256")
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, nil, err
		}
		for _, e := range entries {
			info, err := e.Info()
			if err != nil {
				return nil, nil, err
			}
			blobs["sha256:"+e.Name()] = blob{filepath.Join(dir, e.Name()), 0, info.Size()}
		}
		return blobs, index.Manifests, nil
	}

	f, err := os.Open(file)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	found := false
	for t := tar.NewReader(f); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, nil, err
		}
		name := path.Clean(h.Name)
		if name == "index.json" {
			if err := json.NewDecoder(io.LimitReader(t, 1<<20)).Decode(&index); err != nil {
				return nil, nil, fmt.Errorf("decode index.json: %w", err)
			}
			found = true
		}
		if hex, ok := strings.CutPrefix(name, "blobs/sha256/"); ok && h.Typeflag == tar.TypeReg {
			offset, err := f.Seek(0, io.SeekCurrent) // the reader is at the entry's first byte
			if err != nil {
				return nil, nil, err
			}
			blobs["sha256:"+hex] = blob{file, offset, h.Size}
		}
	}
	if !found {
		return nil, nil, errors.New("not an OCI archive: no index.json")
	}
	return blobs, index.Manifests, nil
}

// normalRef expands short names like containerd.
func normalRef(ref string) string {
	host, rest, ok := strings.Cut(ref, "/")
	switch {
	case !ok:
		ref = "docker.io/library/" + ref
	case !strings.ContainsAny(host, ".:") && host != "localhost":
		ref = "docker.io/" + host + "/" + rest
	}
	if i := strings.LastIndexByte(ref, ':'); i < strings.LastIndexByte(ref, '/') {
		ref += ":latest"
	}
	return ref
}

var v2RE = regexp.MustCompile(`^/v2/([a-z0-9]+(?:[._/-]+[a-z0-9]+)*)/(manifests|blobs)/([A-Za-z0-9_][A-Za-z0-9._:-]{0,127})$`)

// ServeHTTP implements the pull half of the OCI distribution protocol.
func (r *registry) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	w.Header().Set("Docker-Distribution-API-Version", "registry/2.0")
	if req.Method != http.MethodGet && req.Method != http.MethodHead {
		r.refuse(w, http.StatusMethodNotAllowed, "UNSUPPORTED", "this registry can only be read")
		return
	}
	if req.URL.Path == "/v2/" || req.URL.Path == "/v2" {
		return
	}
	m := v2RE.FindStringSubmatch(req.URL.Path)
	if m == nil {
		r.refuse(w, http.StatusNotFound, "NAME_UNKNOWN", "no such resource")
		return
	}
	name, kind, ref := m[1], m[2], m[3]
	if kind == "manifests" && r.pulled != nil {
		r.pulled(req.RemoteAddr)
	}
	var d descriptor
	var ok bool
	if r.faults == nil || !r.faults().registryEmpty {
		d, ok = r.find(req.URL.Query().Get("ns"), name, kind, ref)
	}
	if !ok {
		code, what := "MANIFEST_UNKNOWN", "image "+name+":"+ref
		if kind == "blobs" {
			code, what = "BLOB_UNKNOWN", "blob "+ref
		}
		r.log.Warn("image not served", "image", name, "reference", ref, "registry", req.URL.Query().Get("ns"))
		r.refuse(w, http.StatusNotFound, code, what+" is not in this sandbox")
		return
	}
	r.mu.RLock()
	b := r.blobs[d.Digest]
	r.mu.RUnlock()
	f, err := os.Open(b.file)
	if err != nil {
		r.log.Error("image not served", "image", name, "reference", ref, "err", err)
		r.refuse(w, http.StatusInternalServerError, "UNKNOWN", "the image is gone from the cache")
		return
	}
	defer f.Close()
	w.Header().Set("Content-Type", d.MediaType)
	w.Header().Set("Docker-Content-Digest", d.Digest)
	w.Header().Set("ETag", `"`+d.Digest+`"`)
	http.ServeContent(w, req, "", time.Time{}, io.NewSectionReader(f, b.offset, b.size))
}

// find resolves a request. ns is the registry that the client names, if any.
func (r *registry) find(ns, name, kind, ref string) (descriptor, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if strings.HasPrefix(ref, "sha256:") {
		b, ok := r.blobs[ref]
		if !ok {
			return descriptor{}, false
		}
		if kind == "blobs" {
			return descriptor{MediaType: "application/octet-stream", Digest: ref, Size: b.size}, true
		}
		for _, d := range r.refs {
			if d.Digest == ref {
				return d, true
			}
		}
		// A manifest below an index: its media type is in its first bytes.
		return descriptor{MediaType: b.mediaType(), Digest: ref, Size: b.size}, true
	}
	if kind == "blobs" {
		return descriptor{}, false
	}
	if ns != "" {
		d, ok := r.refs[normalRef(ns+"/"+name+":"+ref)]
		return d, ok
	}
	if d, ok := r.refs[normalRef(name+":"+ref)]; ok {
		return d, true
	}
	for key, d := range r.refs { // a direct request: any registry's image of that name
		if _, rest, _ := strings.Cut(key, "/"); rest == name+":"+ref {
			return d, true
		}
	}
	return descriptor{}, false
}

// mediaType reads the media type from a manifest.
func (b blob) mediaType() string {
	const manifest = "application/vnd.oci.image.manifest.v1+json"
	f, err := os.Open(b.file)
	if err != nil {
		return manifest
	}
	defer f.Close()
	var m struct {
		MediaType string `json:"mediaType"`
	}
	if json.NewDecoder(io.NewSectionReader(f, b.offset, min(b.size, 4<<20))).Decode(&m) != nil || m.MediaType == "" {
		return manifest
	}
	return m.MediaType
}

func (r *registry) refuse(w http.ResponseWriter, status int, code, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(map[string]any{"errors": []map[string]string{{"code": code, "message": message}}}); err != nil {
		r.log.Debug("answer not sent", "err", err)
	}
}
