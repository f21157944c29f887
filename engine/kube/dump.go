package kube

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"constellation/engine"
	"constellation/engine/backup"
	"constellation/engine/cluster"
	"constellation/internal/delay"
)

var _ engine.Backups = (*Client)(nil)

// Page sizes of a dump. A page costs the API server work that grows with the collection, so
// pages are large. The API server holds one page in memory.
const (
	firstPage = 500      // objects, while their size is unknown
	pageBytes = 16 << 20 // target size of later pages
	leastPage = 100
	mostPage  = 10000
)

// patience is how long a dump waits for transient errors. Each timer restarts when data
// arrives.
type patience struct {
	// away is for an API server that is unreachable or overloaded.
	away time.Duration
	// wrong is for an answer that is an error or cannot be decoded.
	wrong time.Duration
	// silent is how long an answer may stall.
	silent time.Duration
	// appear is how long a kind may stay unserved although its definition is established.
	appear time.Duration
}

var patient = patience{away: 2 * time.Minute, wrong: 20 * time.Second, silent: time.Minute, appear: 5 * time.Second}

// readers is how many types are read concurrently.
const readers = 2

// helmType is the type of Secrets that hold Helm's records.
const helmType = "helm.sh/release.v1"

// volatile are ConfigMaps that controllers write by themselves. Restoring them from another
// cluster or an older state would do harm.
var volatile = map[string]bool{"kube-root-ca.crt": true, "extension-apiserver-authentication": true, "cluster-autoscaler-status": true}

// Dump implements [engine.Backups].
//
// The API server's answer is split into objects as it arrives, and each object is written
// unchanged, so memory does not depend on the size of the cluster. Two types are read
// concurrently, each in pages of one resourceVersion.
func (c *Client) Dump(ctx context.Context, w *backup.Writer, o engine.DumpOptions, report func(engine.BackupProgress)) error {
	return c.dump(ctx, w, o, report, patient)
}

func (c *Client) dump(ctx context.Context, w *backup.Writer, o engine.DumpOptions, report func(engine.BackupProgress), p patience) error {
	config := rest.CopyConfig(c.config)
	config.QPS = -1 // at most two requests are in flight, and the API server throttles them
	config.APIPath, config.GroupVersion, config.NegotiatedSerializer = "/api", &metav1.Unversioned, scheme.Codecs.WithoutConversion()
	client, err := rest.UnversionedRESTClientFor(config)
	if err != nil {
		return fmt.Errorf("make Kubernetes client: %w", err)
	}
	d := &dumper{client: client, w: w, report: report, patience: p, seen: map[string]string{}}
	if err := d.run(ctx, o); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return err
	}
	return nil
}

// dumper is one dump.
type dumper struct {
	client   rest.Interface
	w        *backup.Writer
	patience patience

	mu     sync.Mutex
	report func(engine.BackupProgress)
	so     engine.BackupProgress
	seen   map[string]string // UIDs of kinds, by name
}

// job is a type to read.
type job struct {
	t    backup.Type
	file string // without ".json"; if empty, derived from the type
	path string
	// selector is a field selector.
	selector string
	// skip omits objects by name.
	skip func(name string) bool
	// each is called for each object; restart, when reading the type restarts.
	each    func(*backup.Item) error
	restart func()
	// crd is the name of its definition; empty for built-in types.
	crd string
	// size is the approximate number of objects.
	size int64
}

func (d *dumper) run(ctx context.Context, o engine.DumpOptions) error {
	from, err := d.identity(ctx)
	if err != nil {
		return err
	}
	d.w.From(from)

	crds, err := d.w.Type(backup.Type{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions", Kind: "CustomResourceDefinition", Status: true}, backup.CRDs)
	if err != nil {
		return err
	}
	var kinds []kindInfo
	var version string
	d.add(func(p *engine.BackupProgress) {
		p.Type, p.AllTypes = "customresourcedefinitions.apiextensions.k8s.io", 1
	})
	err = d.read(ctx, job{
		path: "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
		each: func(i *backup.Item) error {
			k, err := kindOf(i.JSON)
			kinds = append(kinds, k)
			return err
		},
		restart: func() { kinds = nil },
	}, crds, &version)
	var gap *gapError
	if errors.As(err, &gap) {
		d.w.Hole(backup.Hole{Group: "apiextensions.k8s.io", Resource: "customresourcedefinitions", Reason: gap.reason})
		err = nil
	}
	if err != nil {
		return err
	}
	sizes := d.sizes(ctx)
	jobs := builtIn(o)
	jobs = append(jobs, d.jobsOf(kinds)...)
	for i := range jobs {
		jobs[i].size = sizes[jobs[i].t.String()]
	}
	// The largest first: otherwise one of them would be read alone at the end.
	slices.SortStableFunc(jobs, func(a, b job) int { return cmp.Compare(b.size, a.size) })
	d.add(func(p *engine.BackupProgress) {
		p.Types, p.AllTypes = 1, int64(len(jobs)+1)
		p.AllObjects = p.Objects
		for _, j := range jobs {
			if j.crd != "" {
				p.AllObjects += j.size
			}
		}
		if len(sizes) == 0 {
			p.AllObjects = 0
		}
	})
	for range 3 {
		if err := d.all(ctx, jobs); err != nil {
			return err
		}
		// Kinds that were created in the meantime are read, too.
		if jobs, err = d.appeared(ctx, crds); err != nil {
			return err
		}
		if len(jobs) == 0 {
			break
		}
		d.add(func(p *engine.BackupProgress) { p.AllTypes += int64(len(jobs)) })
	}
	for _, j := range jobs {
		d.w.Note(j.t.String() + " was created during the backup; its objects are not in the backup")
	}
	return crds.Close(version)
}

// add changes the progress and reports it.
func (d *dumper) add(change func(*engine.BackupProgress)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	change(&d.so)
	d.so.Bytes = d.w.Bytes()
	if d.report != nil {
		d.report(d.so)
	}
}

// identity reads the identity of the cluster.
func (d *dumper) identity(ctx context.Context) (backup.Cluster, error) {
	var out backup.Cluster
	var v struct {
		GitVersion string `json:"gitVersion"`
	}
	var ns metav1.PartialObjectMetadata
	limited, cancel := context.WithTimeout(ctx, d.patience.away)
	defer cancel()
	for path, into := range map[string]any{"/version": &v, "/api/v1/namespaces/" + systemNamespace: &ns} {
		err := retry(limited, func(ctx context.Context) error {
			b, err := d.client.Get().AbsPath(path).SetHeader("Accept", "application/json").MaxRetries(0).DoRaw(ctx)
			if err != nil {
				return err
			}
			return unmarshal(b, into)
		})
		if err != nil && (path == "/version" || !errors.Is(err, cluster.ErrForbidden)) {
			return out, fmt.Errorf("read identity of the cluster: %w", err)
		}
	}
	return backup.Cluster{UID: string(ns.UID), Server: v.GitVersion}, nil
}

// sizes returns the approximate number of objects of each type from the API server's metrics,
// which may be a minute old; nothing if they cannot be read.
func (d *dumper) sizes(ctx context.Context) map[string]int64 {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	body, err := d.client.Get().AbsPath("/metrics").SetHeader("Accept", "text/plain").MaxRetries(0).Stream(ctx)
	if err != nil {
		return nil
	}
	defer body.Close()
	out := map[string]int64{}
	lines := bufio.NewScanner(body)
	for lines.Scan() {
		line := lines.Bytes()
		if !bytes.HasPrefix(line, []byte("apiserver_storage_objects{")) && !bytes.HasPrefix(line, []byte("apiserver_resource_objects{")) {
			continue
		}
		labels, value, _ := strings.Cut(string(line), "} ")
		n, err := strconv.ParseFloat(value, 64)
		if err != nil || n < 0 {
			continue
		}
		name := label(labels, "resource")
		if g := label(labels, "group"); g != "" {
			name += "." + g
		}
		out[name] = int64(n)
	}
	return out
}

func label(labels, name string) string {
	for _, before := range []string{"{", ","} {
		if _, rest, ok := strings.Cut(labels, before+name+`="`); ok {
			v, _, _ := strings.Cut(rest, `"`)
			return v
		}
	}
	return ""
}

// builtIn are all types except custom resources.
func builtIn(o engine.DumpOptions) []job {
	secrets := backup.Type{Version: "v1", Resource: "secrets", Kind: "Secret", Namespaced: true}
	maps := backup.Type{Version: "v1", Resource: "configmaps", Kind: "ConfigMap", Namespaced: true}
	jobs := []job{{t: secrets, file: backup.Releases, path: "/api/v1/secrets", selector: "type=" + helmType}}
	for _, ns := range []string{systemNamespace, Namespace} {
		jobs = append(jobs, job{t: maps, file: ns + "/configmaps", path: "/api/v1/namespaces/" + ns + "/configmaps", skip: func(name string) bool { return volatile[name] }})
	}
	if o.Secrets {
		jobs = append(jobs, job{t: secrets, path: "/api/v1/secrets", selector: "type!=" + helmType})
	}
	return jobs
}

// kindInfo is the slim copy of a CustomResourceDefinition.
type kindInfo struct {
	Metadata struct {
		Name string `json:"name"`
		UID  string `json:"uid"`
	} `json:"metadata"`
	Spec struct {
		Group string `json:"group"`
		Names struct {
			Plural string `json:"plural"`
			Kind   string `json:"kind"`
		} `json:"names"`
		Scope    string `json:"scope"`
		Versions []struct {
			Name         string `json:"name"`
			Served       bool   `json:"served"`
			Storage      bool   `json:"storage"`
			Subresources *struct {
				Status *struct{} `json:"status"`
			} `json:"subresources"`
		} `json:"versions"`
	} `json:"spec"`
	Status struct {
		Conditions []struct {
			Type   string `json:"type"`
			Status string `json:"status"`
		} `json:"conditions"`
		StoredVersions []string `json:"storedVersions"`
	} `json:"status"`
}

func kindOf(b []byte) (kindInfo, error) {
	var k kindInfo
	if err := json.Unmarshal(b, &k); err != nil {
		return k, fmt.Errorf("read kind: %w", err)
	}
	return k, nil
}

func (k *kindInfo) established() bool {
	for _, c := range k.Status.Conditions {
		if c.Type == "Established" {
			return c.Status == "True"
		}
	}
	return false
}

// version returns the version to read: the stored one if it is served, since that needs no
// conversion; else another version with stored objects, else any.
func (k *kindInfo) version() (name string, status, ok bool) {
	best := -1
	for _, v := range k.Spec.Versions {
		rank := 1
		switch {
		case !v.Served:
			continue
		case v.Storage:
			rank = 3
		case slices.Contains(k.Status.StoredVersions, v.Name):
			rank = 2
		}
		if rank > best {
			best = rank
			name, status, ok = v.Name, v.Subresources != nil && v.Subresources.Status != nil, true
		}
	}
	return name, status, ok
}

// jobsOf returns the jobs for kinds, and notes the kinds that cannot be read.
func (d *dumper) jobsOf(kinds []kindInfo) []job {
	var out []job
	for _, k := range kinds {
		d.mu.Lock()
		d.seen[k.Metadata.Name] = k.Metadata.UID
		d.mu.Unlock()
		j, ok := jobOf(&k)
		switch {
		case ok:
			out = append(out, j)
		case k.established():
			d.w.Hole(backup.Hole{Group: k.Spec.Group, Resource: k.Spec.Names.Plural, Reason: "no version of it is served; its objects cannot be read"})
		}
	}
	return out
}

// jobOf returns the job for a kind; nil if there is nothing to read. A kind that was never
// established has no objects.
func jobOf(k *kindInfo) (job, bool) {
	version, status, ok := k.version()
	if !ok || !k.established() {
		return job{}, false
	}
	t := backup.Type{Group: k.Spec.Group, Version: version, Resource: k.Spec.Names.Plural, Kind: k.Spec.Names.Kind, Namespaced: k.Spec.Scope == "Namespaced", Status: status}
	return job{t: t, path: "/apis/" + k.Spec.Group + "/" + version + "/" + k.Spec.Names.Plural, crd: k.Metadata.Name}, true
}

// appeared returns the jobs for new kinds and adds these kinds to the known ones.
func (d *dumper) appeared(ctx context.Context, crds *backup.TypeWriter) ([]job, error) {
	const path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
	var list metav1.PartialObjectMetadataList
	err := d.ask(ctx, path, "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1", &list)
	if errors.Is(err, cluster.ErrForbidden) {
		return nil, nil // noted as a gap already
	}
	if err != nil {
		return nil, err
	}
	var jobs []job
	for _, m := range list.Items {
		switch have := d.seen[m.Name]; {
		case have == string(m.UID):
			continue
		case have != "":
			d.w.Note(m.Name + " was deleted and recreated during the backup")
			d.seen[m.Name] = string(m.UID)
			continue
		}
		var raw json.RawMessage
		err := d.ask(ctx, path+"/"+m.Name, "application/json", &raw)
		if errors.Is(err, cluster.ErrAbsent) {
			continue
		}
		if err != nil {
			return nil, err
		}
		k, err := kindOf(raw)
		if err != nil {
			return nil, err
		}
		s := backup.NewScanner(io.MultiReader(strings.NewReader(`{"items":[`), bytes.NewReader(raw), strings.NewReader(`]}`)))
		for s.Next() {
			if err := crds.Add(s.Item()); err != nil {
				return nil, err
			}
		}
		if s.Err() != nil {
			return nil, s.Err()
		}
		d.add(func(p *engine.BackupProgress) { p.Objects++ })
		jobs = append(jobs, d.jobsOf([]kindInfo{k})...)
	}
	return jobs, nil
}

// ask reads one document.
func (d *dumper) ask(ctx context.Context, path, accept string, into any) error {
	ctx, cancel := context.WithTimeout(ctx, d.patience.away)
	defer cancel()
	err := retry(ctx, func(ctx context.Context) error {
		b, err := d.client.Get().AbsPath(path).SetHeader("Accept", accept).MaxRetries(0).DoRaw(ctx)
		if err != nil {
			return err
		}
		return unmarshal(b, into)
	})
	if err != nil {
		return fmt.Errorf("read %s: %w", path[strings.LastIndexByte(path, '/')+1:], err)
	}
	return nil
}

// all reads jobs, two at a time. The first error ends it.
func (d *dumper) all(ctx context.Context, jobs []job) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	next := make(chan job)
	var wg sync.WaitGroup
	for range min(readers, len(jobs)) {
		wg.Go(func() {
			for j := range next {
				if err := d.one(ctx, j); err != nil {
					cancel(err)
					return
				}
			}
		})
	}
	for _, j := range jobs {
		select {
		case next <- j:
		case <-ctx.Done():
		}
	}
	close(next)
	wg.Wait()
	return context.Cause(ctx)
}

// one reads a type.
func (d *dumper) one(ctx context.Context, j job) error {
	d.add(func(p *engine.BackupProgress) { p.Type = j.t.String() })
	t, err := d.w.Type(j.t, j.file)
	if err != nil {
		return err
	}
	var version string
	err = d.read(ctx, j, t, &version)
	if j.crd != "" && errors.Is(err, cluster.ErrAbsent) && !errors.Is(err, errWriter) {
		err = d.vanished(ctx, j, t, &version)
	}
	var gap *gapError
	switch {
	case errors.As(err, &gap):
		reason := gap.reason
		if n := t.Objects(); n > 0 {
			reason = fmt.Sprintf("only %d objects could be read: %s", n, reason)
		}
		d.w.Hole(backup.Hole{Group: j.t.Group, Resource: j.t.Resource, Reason: reason})
	case errors.Is(err, errGone):
		d.w.Note(j.t.String() + " was deleted during the backup; its objects are not in the backup")
		if err := t.Discard(); err != nil {
			return err
		}
		d.add(func(p *engine.BackupProgress) { p.Types++ })
		return nil
	case err != nil:
		return err
	}
	if err := t.Close(version); err != nil {
		return fmt.Errorf("%w%w", errWriter, err)
	}
	d.add(func(p *engine.BackupProgress) { p.Types++ })
	return nil
}

// errGone is the error of a deleted kind.
var errGone = errors.New("gone")

// vanished finds out why a kind is not served, and reads it if it is served again.
func (d *dumper) vanished(ctx context.Context, j job, t *backup.TypeWriter, version *string) error {
	path := "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/" + j.crd
	for begun := time.Now(); ; {
		var raw json.RawMessage
		err := d.ask(ctx, path, "application/json", &raw)
		if errors.Is(err, cluster.ErrAbsent) {
			return errGone
		}
		if err != nil {
			return err
		}
		k, err := kindOf(raw)
		if err != nil {
			return err
		}
		again, ok := jobOf(&k)
		if !ok {
			return &gapError{"no version of it is served any more"}
		}
		again.size = j.size
		d.again(j, t)
		if err := t.Reset(); err != nil {
			return fmt.Errorf("%w%w", errWriter, err)
		}
		t.Retype(again.t)
		if err := d.read(ctx, again, t, version); !errors.Is(err, cluster.ErrAbsent) || errors.Is(err, errWriter) {
			return err
		}
		if time.Since(begun) > d.patience.appear {
			return &gapError{"the API server does not serve this kind"}
		}
		if !delay.For(ctx, 100*time.Millisecond) {
			return ctx.Err()
		}
	}
}

// gapError is a permanent read error of a type.
type gapError struct{ reason string }

func (e *gapError) Error() string { return e.reason }

// errWriter marks errors of the backup's writer, to separate them from the cluster's.
var errWriter = &writerError{}

type writerError struct{}

func (*writerError) Error() string { return "" }

// again discards the counts of a type before it is read again.
func (d *dumper) again(j job, t *backup.TypeWriter) {
	n := t.Objects()
	d.add(func(p *engine.BackupProgress) { p.Objects -= n })
	if j.restart != nil {
		j.restart()
	}
}

// read reads all objects of a type. The error is a *gapError if they are permanently
// unreadable. It wraps ErrAbsent if the type is not served, and errWriter if writing fails.
func (d *dumper) read(ctx context.Context, j job, t *backup.TypeWriter, version *string) error {
	scanner := backup.NewScanner(nil)
	limit, token := int64(firstPage), ""
	var expired int
	begun, failures := time.Now(), 0
	for {
		if err := t.Mark(); err != nil {
			return fmt.Errorf("%w%w", errWriter, err)
		}
		before := t.Objects()
		meta, n, err := d.page(ctx, j, t, scanner, limit, token)
		if err == nil {
			if token == "" {
				*version = meta.ResourceVersion
			}
			begun, failures = time.Now(), 0
			if meta.Continue == "" {
				return nil
			}
			token = meta.Continue
			if got := t.Objects() - before; got > 0 {
				limit = min(max(pageBytes/max(n/got, 1), leastPage), mostPage)
			}
			continue
		}
		if errors.Is(err, errWriter) || ctx.Err() != nil {
			return err
		}
		if token != "" && apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
			// The following pages would be of another time than those read so far.
			d.again(j, t)
			if err := t.Reset(); err != nil {
				return fmt.Errorf("%w%w", errWriter, err)
			}
			if token, expired = "", expired+1; expired >= 3 {
				limit = 0 // an unpaged list cannot expire
			}
			continue
		}
		taken := t.Objects() - before
		d.add(func(p *engine.BackupProgress) { p.Objects -= taken })
		if err := t.Rollback(); err != nil {
			return fmt.Errorf("%w%w", errWriter, err)
		}
		failures++
		wait, err := d.judge(err, time.Since(begun), failures)
		if err != nil {
			return err
		}
		if !delay.For(ctx, wait) {
			return ctx.Err()
		}
	}
}

// judge returns how long to wait before the page is requested again, or why it is not
// requested again.
func (d *dumper) judge(err error, since time.Duration, failures int) (time.Duration, error) {
	wait := min(100*time.Millisecond<<min(failures-1, 10), 5*time.Second)
	wait = wait/2 + rand.N(wait)
	if s, ok := apierrors.SuggestsClientDelay(err); ok {
		wait = max(wait, min(time.Duration(s)*time.Second, 30*time.Second))
	}
	kind := classify(err)
	switch {
	case errors.Is(kind, cluster.ErrAbsent):
		return 0, kind
	case errors.Is(kind, cluster.ErrForbidden):
		return 0, &gapError{"access denied: " + reasonOf(err)}
	case errors.Is(kind, cluster.ErrDenied):
		return 0, kind
	case errors.Is(err, backup.ErrSyntax):
		if since < d.patience.wrong {
			return wait, nil
		}
		return 0, &gapError{"the API server's answer cannot be decoded"}
	case apierrors.IsInternalError(err), !errors.Is(kind, cluster.ErrUnreachable):
		// A conversion webhook that fails, or an object that cannot be decoded or decrypted.
		if since < d.patience.wrong && errors.Is(kind, cluster.ErrUnreachable) {
			return wait, nil
		}
		return 0, &gapError{reasonOf(err)}
	case since < d.patience.away:
		return wait, nil
	}
	return 0, fmt.Errorf("list %w", kind)
}

// reasonOf is the API server's message on one line of limited length.
func reasonOf(err error) string {
	text := strings.Join(strings.Fields(err.Error()), " ")
	if r := []rune(text); len(r) > 300 {
		text = string(r[:299]) + "…"
	}
	return text
}

// page reads one page and returns the size of its objects in bytes. A limit of zero reads
// everything.
func (d *dumper) page(ctx context.Context, j job, t *backup.TypeWriter, s *backup.Scanner, limit int64, token string) (meta backup.ListMeta, size int64, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	// A stalled request is canceled and sent again.
	silence := time.AfterFunc(d.patience.silent, func() {
		cancel(fmt.Errorf("%w: no data for %s", cluster.ErrUnreachable, d.patience.silent))
	})
	defer silence.Stop()
	defer func() {
		if cause := context.Cause(ctx); err != nil && errors.Is(cause, cluster.ErrUnreachable) && !errors.Is(err, errWriter) {
			err = cause
		}
	}()
	query := url.Values{}
	if limit > 0 {
		query.Set("limit", strconv.FormatInt(limit, 10))
	}
	if token != "" {
		query.Set("continue", token)
	}
	if j.selector != "" {
		query.Set("fieldSelector", j.selector)
	}
	r := d.client.Get().AbsPath(j.path).SetHeader("Accept", "application/json").MaxRetries(0)
	for k, v := range query {
		r = r.Param(k, v[0])
	}
	body, err := r.Stream(ctx)
	if err != nil {
		return meta, 0, err
	}
	defer body.Close()
	s.Reset(readerFunc(func(b []byte) (int, error) {
		n, err := body.Read(b)
		silence.Reset(d.patience.silent)
		return n, err
	}))
	var told, n int64
	for s.Next() {
		i := s.Item()
		if j.skip != nil && j.skip(strings.Trim(string(i.Name), `"`)) {
			continue
		}
		if j.each != nil {
			if err := j.each(i); err != nil {
				return meta, size, err
			}
		}
		if err := t.Add(i); err != nil {
			return meta, size, fmt.Errorf("%w%w", errWriter, err)
		}
		n++
		size += int64(len(i.JSON))
		if n-told == 100 {
			told = n
			d.add(func(p *engine.BackupProgress) { p.Objects += 100 })
		}
	}
	d.add(func(p *engine.BackupProgress) { p.Objects += n - told })
	if err := s.Err(); err != nil {
		return meta, size, err
	}
	meta, err = s.Meta()
	return meta, size, err
}

type readerFunc func([]byte) (int, error)

// Read implements [io.Reader].
func (f readerFunc) Read(b []byte) (int, error) { return f(b) }
