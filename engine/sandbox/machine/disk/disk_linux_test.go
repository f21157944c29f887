package disk_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/machine/disk"
	"constellation/internal/testneeds"
)

func TestMain(m *testing.M) {
	if disk.IsServer(os.Args[1:]) {
		os.Exit(disk.Main(os.Args[1:]))
	}
	os.Exit(m.Run())
}

// rig is a disk and a namespace in which it can be mounted.
type rig struct {
	t          *testing.T
	dir        string // of the disk
	target     string // where it is in the namespace
	namespace  int    // a process in it
	server     *exec.Cmd
	log        bytes.Buffer
	serverDone chan struct{}
}

func newRig(t *testing.T) *rig {
	t.Helper()
	testneeds.Root(t, "to mount a disk that fails")
	if err := disk.Supported(); err != nil {
		t.Skip(err)
	}
	r := &rig{t: t, dir: t.TempDir(), target: t.TempDir()}
	if err := os.Mkdir(filepath.Join(r.dir, "etcd"), 0o700); err != nil {
		t.Fatal(err)
	}
	holder := exec.Command("sleep", "infinity")
	holder.SysProcAttr = &unix.SysProcAttr{Unshareflags: unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	if err := holder.Start(); err != nil {
		t.Skip("no namespace of mounts can be made: ", err)
	}
	t.Cleanup(func() {
		r.end(unix.SIGKILL)
		_ = holder.Process.Kill()
		_ = holder.Wait()
	})
	r.namespace = holder.Process.Pid
	return r
}

// start serves the disk and mounts it.
func (r *rig) start(s disk.Settings) {
	r.t.Helper()
	r.set(s)
	namespace, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", r.namespace))
	if err != nil {
		r.t.Fatal(err)
	}
	defer namespace.Close()
	if got := r.serve(namespace); got != disk.Ready {
		r.t.Fatalf("the server said %q: %s", got, &r.log)
	}
}

// serve starts the server and returns its content of ReadyFD.
func (r *rig) serve(namespace *os.File) string {
	r.t.Helper()
	ready, theirs, err := os.Pipe()
	if err != nil {
		r.t.Fatal(err)
	}
	defer ready.Close()
	r.log.Reset()
	server := exec.Command(os.Args[0], disk.Args(r.dir, "etcd", r.target)...)
	server.Stderr = &r.log
	server.ExtraFiles = []*os.File{namespace, theirs}
	server.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	err = server.Start()
	_ = theirs.Close()
	if err != nil {
		r.t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Wait() }()
	r.server, r.serverDone = server, done
	said, err := io.ReadAll(ready)
	if err != nil {
		r.t.Fatal(err)
	}
	return string(said)
}

func (r *rig) set(s disk.Settings) {
	r.t.Helper()
	b, err := json.Marshal(s)
	if err != nil {
		r.t.Fatal(err)
	}
	if err := os.WriteFile(disk.SettingsFile(r.dir, "etcd"), b, 0o600); err != nil {
		r.t.Fatal(err)
	}
	if r.server != nil {
		if err := r.server.Process.Signal(unix.SIGHUP); err != nil {
			r.t.Fatal(err)
		}
	}
}

// end ends the server by a signal, and removes the mount.
func (r *rig) end(s unix.Signal) {
	if r.server == nil {
		return
	}
	_ = r.server.Process.Signal(s)
	<-r.serverDone
	r.server = nil
	if out, err := r.inside("umount", "-l", r.target).CombinedOutput(); err != nil {
		r.t.Errorf("unmount: %v: %s", err, out)
	}
}

// inside returns a command in the namespace.
func (r *rig) inside(args ...string) *exec.Cmd {
	cmd := exec.Command("nsenter", append([]string{"--mount=/proc/" + strconv.Itoa(r.namespace) + "/ns/mnt"}, args...)...)
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	return cmd
}

// path is the path of a file of the mounted disk, for this process.
func (r *rig) path(name string) string {
	return filepath.Join(fmt.Sprintf("/proc/%d/root", r.namespace), r.target, name)
}

// tree lists the content of the disk: the names of directories end with /.
func (r *rig) tree() map[string]string {
	r.t.Helper()
	found := map[string]string{}
	root := filepath.Join(r.dir, "etcd")
	if err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || path == root {
			return err
		}
		name := strings.TrimPrefix(path, root+"/")
		if e.IsDir() {
			found[name+"/"] = ""
			return nil
		}
		b, err := os.ReadFile(path)
		found[name] = string(b)
		return err
	}); err != nil {
		r.t.Fatal(err)
	}
	return found
}

// hand changes files for a test and fails it on errors.
type hand struct{ r *rig }

func (h hand) must(err error) {
	h.r.t.Helper()
	if err != nil {
		h.r.t.Fatal(err)
	}
}

func (h hand) write(name, data string, flags int) {
	h.r.t.Helper()
	f, err := os.OpenFile(h.r.path(name), os.O_WRONLY|flags, 0o600)
	h.must(err)
	_, err = f.WriteString(data)
	h.must(errors.Join(err, f.Close()))
}

func (h hand) sync(name string) {
	h.r.t.Helper()
	f, err := os.Open(h.r.path(name))
	h.must(err)
	h.must(errors.Join(f.Sync(), f.Close()))
}

func (h hand) rename(from, to string) {
	h.r.t.Helper()
	h.must(os.Rename(h.r.path(from), h.r.path(to)))
}

func TestAPowerCutLosesUnsyncedWrites(t *testing.T) {
	page := func(c string) string { return strings.Repeat(c, 4096) }
	for _, tt := range []struct {
		name   string
		loss   disk.Loss
		signal unix.Signal
		do     func(h hand)
		want   map[string]string
	}{
		{name: "a new file goes", loss: disk.All, signal: unix.SIGTERM, do: func(h hand) { h.write("b", "x", os.O_CREATE) }, want: map[string]string{"a": "old"}},
		{name: "a synced file stays", loss: disk.All, signal: unix.SIGTERM, do: func(h hand) { h.write("b", "x", os.O_CREATE); h.sync("b") }, want: map[string]string{"a": "old", "b": "x"}},
		{name: "an unsynced overwrite is undone", loss: disk.All, signal: unix.SIGTERM, do: func(h hand) { h.write("a", "NEW", 0) }, want: map[string]string{"a": "old"}},
		{name: "an unsynced truncation is undone", loss: disk.All, signal: unix.SIGTERM, do: func(h hand) { h.must(os.Truncate(h.r.path("a"), 1)) }, want: map[string]string{"a": "old"}},
		{name: "an unsynced truncation by open is undone", loss: disk.All, signal: unix.SIGTERM, do: func(h hand) { h.write("a", "new and long", os.O_TRUNC) }, want: map[string]string{"a": "old"}},
		{name: "an append after a sync is lost", loss: disk.All, signal: unix.SIGTERM, do: func(h hand) {
			h.write("a", page("1"), os.O_APPEND)
			h.sync("a")
			h.write("a", page("2"), os.O_APPEND)
			h.write("a", "3", 0)
		}, want: map[string]string{"a": "old" + page("1")}},
		{name: "space that was reserved goes", loss: disk.All, signal: unix.SIGTERM, do: func(h hand) {
			f, err := os.OpenFile(h.r.path("a"), os.O_RDWR, 0)
			h.must(err)
			h.must(unix.Fallocate(int(f.Fd()), 0, 0, 1<<20))
			h.must(f.Close())
		}, want: map[string]string{"a": "old"}},
		{name: "a rename without a sync is taken back, with what it replaced", loss: disk.All, signal: unix.SIGTERM, do: func(h hand) {
			h.write("b", "new", os.O_CREATE)
			h.sync("b")
			h.rename("b", "a")
		}, want: map[string]string{"a": "old", "b": "new"}},
		{name: "a file that is renamed, and another synced, is empty: the rename is durable, the data is not", loss: disk.All, signal: unix.SIGTERM, do: func(h hand) {
			h.write("b", "new", os.O_CREATE)
			h.rename("b", "a")
			h.write("c", "else", os.O_CREATE)
			h.sync("c")
		}, want: map[string]string{"a": "", "c": "else"}},
		{name: "the sync of a directory makes names durable", loss: disk.All, signal: unix.SIGTERM, do: func(h hand) {
			h.must(os.Mkdir(h.r.path("d"), 0o700))
			h.write("d/b", "", os.O_CREATE)
			h.must(os.Remove(h.r.path("a")))
			h.sync("d")
			h.must(os.Remove(h.r.path("d/b")))
			h.must(os.Remove(h.r.path("d")))
		}, want: map[string]string{"d/": "", "d/b": ""}},
		{name: "a file that was removed is back", loss: disk.All, signal: unix.SIGTERM, do: func(h hand) { h.must(os.Remove(h.r.path("a"))) }, want: map[string]string{"a": "old"}},
		{name: "with a disk that loses nothing, all stays", loss: disk.Nothing, signal: unix.SIGTERM, do: func(h hand) { h.write("b", "x", os.O_CREATE); h.must(os.Remove(h.r.path("a"))) }, want: map[string]string{"b": "x"}},
		{name: "if the server is killed, all stays", loss: disk.All, signal: unix.SIGKILL, do: func(h hand) { h.write("b", "x", os.O_CREATE); h.must(os.Remove(h.r.path("a"))) }, want: map[string]string{"b": "x"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t)
			if err := os.WriteFile(filepath.Join(r.dir, "etcd", "a"), []byte("old"), 0o600); err != nil {
				t.Fatal(err)
			}
			r.start(disk.Settings{Loss: tt.loss})
			tt.do(hand{r})
			r.end(tt.signal)
			if diff := cmp.Diff(tt.want, r.tree()); diff != "" {
				t.Errorf("the disk has (-want +got):\n%s%s", diff, &r.log)
			}
		})
	}
}

func TestATornWriteIsThereByPages(t *testing.T) {
	const pages = 64
	r := newRig(t)
	r.start(disk.Settings{Loss: disk.Torn})
	h := hand{r}
	h.write("a", strings.Repeat("o", pages*4096), os.O_CREATE)
	h.sync("a")
	h.write("a", strings.Repeat("n", pages*4096), 0)
	r.end(unix.SIGTERM)
	var fresh int
	got := r.tree()["a"]
	for i := range pages {
		switch got[i*4096 : (i+1)*4096] {
		case strings.Repeat("n", 4096):
			fresh++
		case strings.Repeat("o", 4096):
		default:
			t.Errorf("page %d is neither old nor new", i)
		}
	}
	if fresh == 0 || fresh == pages || len(got) != pages*4096 {
		t.Errorf("%d of %d pages are new, of %d bytes", fresh, pages, len(got))
	}
}

func TestASyncTakesAsLongAsTheDiskSays(t *testing.T) {
	r := newRig(t)
	const longer = 50 * time.Millisecond
	r.start(disk.Settings{Sync: longer})
	h := hand{r}
	h.write("a", "x", os.O_CREATE)
	begun := time.Now()
	h.sync("a")
	if took := time.Since(begun); took < longer {
		t.Errorf("it took %s, want at least %s", took, longer)
	}
	r.set(disk.Settings{Sync: time.Hour})
	done := make(chan struct{})
	f, err := os.Open(r.path("a"))
	h.must(err)
	defer f.Close()
	go func() { defer close(done); _ = f.Sync() }()
	r.set(disk.Settings{})
	<-done // or the test times out
}

func TestTheDiskIsNowhereButInItsNamespace(t *testing.T) {
	r := newRig(t)
	mounts := func(process string) int {
		b, err := os.ReadFile("/proc/" + process + "/mountinfo")
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(b), r.target+" ")
	}
	r.set(disk.Settings{})
	ours, err := os.Open("/proc/thread-self/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	if said := r.serve(ours); !strings.Contains(said, "not one of mounts that is another's") {
		t.Errorf("with this computer's namespace it said %q", said)
	}
	<-r.serverDone
	r.server = nil
	r.start(disk.Settings{})
	if here, there := mounts("thread-self"), mounts(strconv.Itoa(r.namespace)); here != 0 || there != 1 {
		t.Errorf("it is mounted %d times here and %d times there", here, there)
	}
	if err := r.server.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-r.serverDone
	if _, err := os.ReadDir(r.path("")); !errors.Is(err, unix.ENOTCONN) {
		t.Errorf("without its server it says %v", err)
	}
	if mounts("thread-self") != 0 {
		t.Error("it is mounted here after the server was killed")
	}
}

// An etcd whose disk loses unsynced writes recovers all acknowledged writes after
// power cuts.
func TestEtcdKeepsWhatItAcknowledged(t *testing.T) {
	t.Parallel()
	for _, loss := range []disk.Loss{disk.All, disk.Torn} {
		t.Run(string(loss), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			acknowledged := map[string]string{}
			for round := range 3 {
				r.start(disk.Settings{Sync: 2 * time.Millisecond, Loss: loss})
				client, kill := r.etcd()
				all, err := client.Get(t.Context(), "", clientv3.WithPrefix())
				if err != nil {
					t.Fatal(err)
				}
				got, lost := map[string]string{}, 0
				for _, kv := range all.Kvs {
					got[string(kv.Key)] = string(kv.Value)
				}
				for k, v := range acknowledged {
					if got[k] != v {
						lost++
					}
				}
				if lost > 0 {
					t.Errorf("%d of %d acknowledged keys are lost", lost, len(acknowledged))
				}
				if round == 2 {
					kill()
					break
				}
				r.putAndCut(client, round, acknowledged, kill)
				t.Logf("%d keys acknowledged; %s", len(acknowledged), strings.TrimSpace(r.log.String()))
			}
		})
	}
}

// An etcd that does not sync loses acknowledged writes. Otherwise the test above would
// prove nothing.
func TestEtcdWithoutSyncsLosesWhatItAcknowledged(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.start(disk.Settings{Loss: disk.All})
	client, kill := r.etcd("--unsafe-no-fsync")
	acknowledged := map[string]string{}
	r.putAndCut(client, 0, acknowledged, kill)
	onDisk := fmt.Sprint(r.tree())
	for k := range acknowledged {
		if !strings.Contains(onDisk, k) {
			return
		}
	}
	t.Errorf("all of %d keys are on the disk; %s", len(acknowledged), &r.log)
}

// etcd starts an etcd on the disk and waits until it answers. kill sends SIGKILL.
func (r *rig) etcd(args ...string) (client *clientv3.Client, kill func()) {
	r.t.Helper()
	testneeds.ControlPlane(r.t)
	bin, err := controlplane.FindBinaries()
	if err != nil {
		r.t.Skip(err)
	}
	sockets, err := os.MkdirTemp("", "etcd-") // paths of sockets must be short
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = os.RemoveAll(sockets) })
	own, peer := "unix://"+sockets+"/client", "unix://"+sockets+"/peer"
	const nobody = "http://localhost:2380" // the advertised address is unused
	var log bytes.Buffer
	cmd := r.inside(append([]string{
		filepath.Join(bin, "etcd"), "--data-dir", r.target, "--snapshot-count", "200", "--heartbeat-interval", "10", "--election-timeout", "100",
		"--listen-client-urls", own, "--advertise-client-urls", nobody,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", nobody, "--initial-cluster", "default=" + nobody,
	}, args...)...)
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { defer close(done); _ = cmd.Wait() }()
	kill = sync.OnceFunc(func() { _ = cmd.Process.Kill() })
	r.t.Cleanup(func() { kill(); <-done })
	client, err = clientv3.New(clientv3.Config{Endpoints: []string{own}, DialTimeout: 10 * time.Second, Logger: zap.NewNop()})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = client.Close() })
	ctx, cancel := context.WithTimeout(r.t.Context(), 30*time.Second)
	defer cancel()
	go func() {
		select {
		case <-done:
			cancel()
		case <-ctx.Done():
		}
	}()
	for {
		if _, err := client.Get(ctx, "ready"); err == nil {
			return client, kill
		} else if ctx.Err() != nil {
			kill()
			<-done
			r.t.Fatalf("etcd did not answer: %v\n%s", err, tail(log.String()))
		}
	}
}

func tail(s string) string { return s[max(0, len(s)-3000):] }

// putAndCut writes keys until some hundred are acknowledged, and cuts the power during
// the writes.
func (r *rig) putAndCut(client *clientv3.Client, round int, acknowledged map[string]string, kill func()) {
	var mu sync.Mutex
	var writers sync.WaitGroup
	ctx, cancel := context.WithCancel(r.t.Context())
	enough := make(chan struct{})
	n := 0
	for w := range 8 {
		writers.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				k, v := fmt.Sprintf("%d/%d/%d", round, w, i), strings.Repeat(strconv.Itoa(i), 1000)
				if _, err := client.Put(ctx, k, v); err != nil {
					return
				}
				mu.Lock()
				acknowledged[k] = v
				if n++; n == 100 {
					close(enough)
				}
				mu.Unlock()
			}
		})
	}
	<-enough
	kill()
	r.end(unix.SIGTERM)
	cancel()
	writers.Wait()
}
