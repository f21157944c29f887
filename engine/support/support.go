// Package support answers: what does a maintainer need to find a fault, and how is it handed over without a secret?
//
// [Write] makes one archive of a workspace, its runs and its cluster. It hides the requests, the removal of secrets, and
// the limits of size and memory. A part that cannot be read is named in the index, with the reason, and never ends the
// collection. The package sends requests that read, never reads a Secret of the cluster, and never writes a file of the workspace
// that has a secret of its own.
//
// Secrets are removed twice. Fields that can have one are left out by their place in an object or a file. A scanner then reads what
// remains ([constellation/engine/secretscan]).
package support

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/engine/secretscan"
	"constellation/engine/workspace"
)

// API is what a collection needs of an API server. Its requests change nothing.
type API interface {
	// Get sends a GET request and returns the status code and the body of the answer, which the caller closes. The error wraps
	// cluster.ErrUnreachable if there is no answer.
	Get(ctx context.Context, path string, query url.Values) (status int, body io.ReadCloser, err error)
	// Metrics reads the metrics that a pod serves at a port of its own address.
	Metrics(ctx context.Context, namespace, pod string, port int32) (io.ReadCloser, error)
	// MissingRules is a ClusterRole with the rights that requests so far lacked; empty without any.
	MissingRules() string
}

// Request selects what goes into a bundle.
type Request struct {
	// Workspace is the folder of the cluster's files; nil means none.
	Workspace *workspace.Workspace
	// Cluster is the cluster to read. If it is nil, WhyNoCluster is the reason.
	Cluster      *cluster.Selected
	WhyNoCluster error
	// File is the path of the archive. Overwrite permits to replace it.
	File      string
	Overwrite bool
	// Since leaves out older runs, events and lines of logs; zero: none.
	Since time.Time
	// Nodes restricts Nodes, and logs of pods, to these nodes; empty: all.
	Nodes []string
	// MaxFile bounds one file of the bundle, and MaxSize all of them, in bytes before compression.
	MaxFile, MaxSize int64
	// Release is the version of this program.
	Release string
	Now     time.Time
	// Secrets are values that the caller knows beside those of the workspace.
	Secrets []secretscan.Secret
	// Progress gets the name of each part when it is begun.
	Progress func(string)
}

// Default limits, in bytes.
const (
	DefaultMaxFile = 8 << 20
	DefaultMaxSize = 256 << 20
)

// Result describes a bundle that was written.
type Result struct {
	// File is the path of the archive, SHA256 the digest of its content, Size its number of bytes.
	File   string `json:"file"`
	SHA256 string `json:"sha256"`
	Size   int64  `json:"size"`
	Index  Index  `json:"index"`
}

// Write collects and writes a bundle. api is nil if there is no cluster to read. The archive appears under its name when it is
// complete; after an error or the end of ctx nothing is left of it.
func Write(ctx context.Context, r Request, api API) (Result, error) {
	r.MaxFile, r.MaxSize = cmp.Or(r.MaxFile, DefaultMaxFile), cmp.Or(r.MaxSize, DefaultMaxSize)
	fail := func(err error) (Result, error) {
		if ctx.Err() != nil {
			return Result{}, context.Cause(ctx)
		}
		e := &plan.Error{Op: "write " + r.File, Err: workspace.WithoutPath(err)}
		switch {
		case errors.Is(err, fs.ErrExist):
			e.Err, e.Exit, e.Remedy = errors.New("the file exists already"), plan.ExitUsage, "name another file with --to, or replace it with --overwrite"
		case errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT):
			e.Remedy = "free some space on the disk, or name a file on another one with --to"
		case errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.EROFS):
			e.Exit, e.Remedy = plan.ExitUsage, "name a file in a folder that this user can write to with --to"
		}
		return Result{}, e
	}
	if _, err := os.Lstat(r.File); err == nil && !r.Overwrite {
		return fail(fs.ErrExist)
	}
	f, err := os.CreateTemp(filepath.Dir(r.File), "."+filepath.Base(r.File)+".*") // 0600
	if err != nil {
		return fail(err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	digest := sha256.New()
	name := strings.TrimSuffix(strings.TrimSuffix(filepath.Base(r.File), ".gz"), ".tar")
	a := newArchive(io.MultiWriter(f, digest), name, r.Now)
	c := &collector{Request: r, api: api, out: a, scan: secretscan.New(append(workspaceSecrets(r.Workspace), r.Secrets...))}
	c.collect(ctx)
	if ctx.Err() != nil {
		return fail(ctx.Err())
	}
	if err := c.finish(); err != nil {
		return fail(err)
	}
	info, err := f.Stat()
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = publish(f.Name(), r.File, r.Overwrite)
	}
	if err != nil {
		return fail(err)
	}
	return Result{File: r.File, SHA256: hex.EncodeToString(digest.Sum(nil)), Size: info.Size(), Index: c.index}, nil
}

// publish gives a complete file its name. Without overwrite it never replaces another file.
func publish(from, to string, overwrite bool) error {
	if overwrite {
		return os.Rename(from, to)
	}
	err := os.Link(from, to)
	if err == nil || errors.Is(err, fs.ErrExist) {
		return err
	}
	// Some file systems have no hard links.
	if _, err := os.Lstat(to); err == nil {
		return fs.ErrExist
	}
	return os.Rename(from, to)
}

// collector collects one bundle.
type collector struct {
	Request
	api   API
	out   *archive
	scan  *secretscan.Scanner
	index Index
	used  int64
	// silent counts requests in a row that got no answer.
	silent int
	failed error // of the archive
}

// neverIncluded is what no bundle has, for its reader.
var neverIncluded = []string{
	"Secrets of the cluster: they are never read",
	"the master secret, the init secret, kubeconfigs, private keys, identities of age, and files with a registry's password",
	"values of environment variables of containers, headers of probes, annotations of other programs",
	"data of ConfigMaps of other programs",
	"backups, and snapshots of etcd",
	"pods, logs and events of namespaces other than constellation-system and kube-system; of namespace default only events of nodes and of objects of ours",
}

func (c *collector) collect(ctx context.Context) {
	ix := &c.index
	ix.Schema, ix.Time, ix.CLI = plan.Schema, c.Now.UTC(), c.Release
	ix.NeverIncluded, ix.Nodes, ix.MaxFile, ix.MaxSize = neverIncluded, c.Nodes, c.MaxFile, c.MaxSize
	if !c.Since.IsZero() {
		at := c.Since.UTC()
		ix.Since = &at
	}
	c.console()
	if c.Workspace != nil {
		c.workspace(ctx)
	}
	switch c.Cluster {
	case nil:
		why := "no cluster was selected"
		if c.WhyNoCluster != nil {
			why = c.WhyNoCluster.Error()
		}
		c.missing("cluster", "", why, plan.Remedy(c.WhyNoCluster))
	default:
		ix.Context, ix.Server = c.Cluster.Context, c.Cluster.Server
		c.cluster(ctx)
	}
	c.missing("journals of machines", "", "the API of Kubernetes does not offer them", "on a machine that the bundle is about, run `journalctl -u kubelet -u constellation-agent -u constellation-bootstrapper`, read its output, and add it")
}

// console adds facts about this program and this computer.
func (c *collector) console() {
	type setting struct {
		Name string `json:"name"`
		Set  bool   `json:"set"`
	}
	facts := struct {
		Release  string            `json:"release"`
		Go       string            `json:"go"`
		Platform string            `json:"platform"`
		CPUs     int               `json:"cpus"`
		Build    map[string]string `json:"build,omitempty"`
		// Variables are those that change what the program does; their values are left out.
		Variables []setting `json:"variables"`
	}{Release: c.Release, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH, CPUs: runtime.NumCPU(), Build: map[string]string{}}
	c.index.Platform = facts.Platform
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if strings.HasPrefix(s.Key, "vcs") || s.Key == "-trimpath" || s.Key == "CGO_ENABLED" {
				facts.Build[s.Key] = s.Value
			}
		}
	}
	for _, name := range []string{"KUBECONFIG", "HTTPS_PROXY", "NO_PROXY", "CI", "NO_COLOR", "ACCESSIBLE", "CONSTELLATION_BACKUP_IDENTITY", "CONSTELLATION_CREDENTIAL_TIMEOUT"} {
		_, set := os.LookupEnv(name)
		facts.Variables = append(facts.Variables, setting{name, set})
	}
	c.addJSON("console/version.json", "this program", facts)
}

// progress reports the part that begins.
func (c *collector) progress(what string) {
	if c.Progress != nil {
		c.Progress(what)
	}
}

// missing notes what could not be collected. Reasons can quote what another program wrote.
func (c *collector) missing(what, source, why, remedy string) {
	why = c.clean(why)
	c.index.Missing = append(c.index.Missing, Missing{What: what, Source: source, Why: why, Remedy: remedy})
}

// clean returns a text of one line without secrets.
func (c *collector) clean(s string) string {
	b, _ := c.scan.Redact([]byte(s))
	return strings.Join(strings.Fields(string(b)), " ")
}

// add adds a file, without the secrets that the scanner finds. cut says what was left out of it; left are the fields that were left
// out by their place, by kind.
func (c *collector) add(path, source string, b []byte, cut string, left map[string]int) {
	if c.failed != nil {
		return
	}
	b, counts := c.scan.Redact(b)
	for kind, n := range left {
		counts[kind] += n
	}
	if c.used+int64(len(b)) > c.MaxSize {
		c.missing(path, source, fmt.Sprintf("with its %s the bundle would be larger than --max-size", workspace.SizeOf(int64(len(b)))), "raise --max-size, or select less with --since or --node")
		return
	}
	c.used += int64(len(b))
	c.index.Files = append(c.index.Files, File{Path: path, Source: source, Bytes: len(b), Cut: cut, Redacted: counted(counts)})
	c.failed = c.out.add(path, b)
}

// counted returns counts by kind, sorted.
func counted(counts map[string]int) (out []Redaction) {
	for _, kind := range slices.Sorted(maps.Keys(counts)) {
		out = append(out, Redaction{kind, counts[kind]})
	}
	return out
}

// finish writes the index and ends the archive.
func (c *collector) finish() error {
	if c.api != nil {
		c.index.MissingRules = c.api.MissingRules()
	}
	total := map[string]int{}
	for _, f := range c.index.Files {
		for _, x := range f.Redacted {
			total[x.Kind] += x.Count
		}
	}
	c.index.Redacted = counted(total)
	if c.failed != nil {
		return c.failed
	}
	b, err := encode(c.index)
	if err != nil {
		return err
	}
	if err := c.out.add("INDEX.json", b); err != nil {
		return err
	}
	if err := c.out.add("INDEX.txt", []byte(c.index.Text())); err != nil {
		return err
	}
	return c.out.close()
}
