package kube

import (
	"fmt"
	"math"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"constellation/engine"
	"constellation/engine/backup"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/sandbox/controlplane/controlplanetest"
	"constellation/internal/testneeds"
)

// proof returns full if the proofs of backups are to be as large as what they prove, and
// else part of it, which takes seconds:
//
//	CONSTELLATION_E2E_BACKUP=1 go test -timeout 60m -run 'TestBackupDuringChurnHasAllPermanentObjects|TestRestoreOfDestroyedObjects' ./engine/kube
func proof(part, full int) int {
	if os.Getenv("CONSTELLATION_E2E_BACKUP") != "" {
		return full
	}
	return part
}

// life is the lifetime of an object of a churn, in resourceVersions.
type life struct {
	plural, name string
	made         int64
	// It was deleted after alive and before gone.
	alive, gone int64
}

// churn creates and deletes objects of some kinds, and changes others, until it ends.
type churn struct {
	h     hand
	kinds []definition
	stays []string // paths of changed objects

	serial atomic.Int64
	mu     sync.Mutex
	moved  *sync.Cond
	lives  []*life
	done   int // number of created and deleted objects
	change int // number of changes
	over   bool
	err    error
	wg     sync.WaitGroup
}

func startChurn(h hand, stays []string, kinds ...definition) *churn {
	c := &churn{h: h, kinds: kinds, stays: stays}
	c.moved = sync.NewCond(&c.mu)
	for w := range 16 {
		c.wg.Go(func() {
			if err := c.write(w); err != nil {
				c.mu.Lock()
				c.err, c.over = err, true
				c.moved.Broadcast()
				c.mu.Unlock()
			}
		})
	}
	return c
}

// end stops the writers, and returns when their last writes are done.
func (c *churn) end() error {
	c.mu.Lock()
	c.over = true
	c.moved.Broadcast()
	c.mu.Unlock()
	c.wg.Wait()
	return c.err
}

// await returns when n objects were created and deleted.
func (c *churn) await(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.done < n && !c.over {
		c.moved.Wait()
	}
}

func (c *churn) write(w int) error {
	const own = 5 // per writer, at a time
	var mine []*life
	var left *life // deleted last
	for round := 0; ; round++ {
		c.mu.Lock()
		over := c.over
		c.mu.Unlock()
		if over {
			return nil
		}
		n := c.serial.Add(1)
		d := c.kinds[n%int64(len(c.kinds))]
		// Among the permanent objects, in the order of keys.
		name := fmt.Sprintf("stays-%06d-%d", n*7919%int64(len(c.stays)), n)
		now, err := c.make(d, name)
		if err != nil {
			return err
		}
		l := &life{plural: d.plural, name: name, made: now, alive: now, gone: math.MaxInt64}
		mine = append(mine, l)
		c.mu.Lock()
		if left != nil {
			left.gone = now
		}
		for _, o := range mine {
			o.alive = now
		}
		c.lives = append(c.lives, l)
		c.mu.Unlock()
		if left = nil; len(mine) == own {
			left, mine = mine[0], mine[1:]
			if _, err := c.h.w.do(c.h.t.Context(), http.MethodDelete, c.path(left.plural)+"/"+left.name, nil, onlyMetadata, nil); err != nil {
				return fmt.Errorf("delete %s: %w", left.name, err)
			}
			c.mu.Lock()
			c.done++
			c.moved.Broadcast()
			c.mu.Unlock()
		}
		if round%10 == 0 {
			// Each permanent object has one writer.
			if err := c.touch(c.stays[(round/10*16+w)%len(c.stays)], n); err != nil {
				return err
			}
		}
	}
}

func (c *churn) path(plural string) string {
	return c.kinds[slices.IndexFunc(c.kinds, func(d definition) bool { return d.plural == plural })].path("default")
}

func (c *churn) make(d definition, name string) (version int64, err error) {
	b, err := c.h.w.do(c.h.t.Context(), http.MethodPost, d.path("default"), nil, onlyMetadata, fmt.Appendf(nil, `{"apiVersion":"shop.example.com/v1","kind":%q,"metadata":{"name":%q},"spec":{"n":1}}`, d.kind, name))
	if err != nil {
		return 0, fmt.Errorf("make %s: %w", name, err)
	}
	var m metav1.PartialObjectMetadata
	if err := unmarshal(b, &m); err != nil {
		return 0, err
	}
	return strconv.ParseInt(m.ResourceVersion, 10, 64)
}

// touch changes a permanent object.
func (c *churn) touch(path string, n int64) error {
	b, err := c.h.w.do(c.h.t.Context(), http.MethodGet, path, nil, onlyMetadata, nil)
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	var m metav1.PartialObjectMetadata
	if err := unmarshal(b, &m); err != nil {
		return err
	}
	now := fmt.Appendf(nil, `{"apiVersion":"shop.example.com/v1","kind":"Widget","metadata":{"name":%q,"resourceVersion":%q},"spec":{"touched":%d}}`, m.Name, m.ResourceVersion, n)
	if _, err := c.h.w.do(c.h.t.Context(), http.MethodPut, path, nil, onlyMetadata, now); err != nil {
		return fmt.Errorf("change %s: %w", path, err)
	}
	c.mu.Lock()
	c.change++
	c.mu.Unlock()
	return nil
}

// judge compares the objects of a type in a backup with those that existed at its
// resourceVersion.
func (c *churn) judge(t backup.Type, has map[string]int) (there, not int, wrong []string) {
	v, err := strconv.ParseInt(t.ResourceVersion, 10, 64)
	if err != nil {
		return 0, 0, []string{err.Error()}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range c.lives {
		if l.plural != t.Resource {
			continue
		}
		switch n := has[l.name]; {
		case l.made <= v && v < l.alive:
			if there++; n != 1 {
				wrong = append(wrong, fmt.Sprintf("%s was there, and is in the backup %d times", l.name, n))
			}
		case v < l.made || l.gone <= v:
			if not++; n != 0 {
				wrong = append(wrong, fmt.Sprintf("%s was not there, and is in the backup %d times", l.name, n))
			}
		}
	}
	return there, not, wrong
}

// answers counts the status codes of an API server.
type answers struct {
	http.RoundTripper
	mu sync.Mutex
	of map[int]int
}

// RoundTrip implements [http.RoundTripper].
func (a *answers) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := a.RoundTripper.RoundTrip(r)
	if err == nil {
		a.mu.Lock()
		a.of[resp.StatusCode]++
		a.mu.Unlock()
	}
	return resp, err
}

// Objects come and go during a backup, and etcd is compacted repeatedly. The backup has each
// type as of one resourceVersion, so it has every object that existed throughout, once.
func TestBackupDuringChurnHasAllPermanentObjects(t *testing.T) {
	t.Run("where pages come from etcd", func(t *testing.T) { // and so expire with it
		keptAllTheTime(t, proof(1500, 100_000), proof(3000, 30_000), "--feature-gates=ListFromCacheSnapshot=false")
	})
	t.Run("where pages come from the API server's cache", func(t *testing.T) {
		testneeds.OptIn(t, "CONSTELLATION_E2E_BACKUP", "minutes")
		keptAllTheTime(t, 100_000, 30_000)
	})
}

// keptAllTheTime creates and deletes n objects while it backs up others.
func keptAllTheTime(t *testing.T, total, stay int, args ...string) {
	cp := controlplanetest.Lend(t, controlplane.Options{APIServerArgs: append(args, "--disable-admission-plugins=ServiceAccount")})
	direct, err := ForConfig(cp.Config(), nil)
	if err != nil {
		t.Fatal(err)
	}
	h := newHand(t, direct)
	seen := &answers{of: map[int]int{}}
	config := cp.Config()
	config.Wrap(func(rt http.RoundTripper) http.RoundTripper { seen.RoundTripper = rt; return seen })
	c, err := ForConfig(config, nil)
	if err != nil {
		t.Fatal(err)
	}
	gadgets := definition{plural: "gadgets", kind: "Gadget", versions: []string{"v1"}}
	moths := definition{plural: "moths", kind: "Moth", versions: []string{"v1"}} // all are temporary
	h.define(widgets, gadgets, moths)
	etcd := etcdOf(t, cp)
	seed(t, etcd, "shop.example.com", "widgets", "Widget", "stays", stay, 1200)
	seed(t, etcd, "shop.example.com", "gadgets", "Gadget", "stays", stay/50, 32000)
	var stays []string
	for i := range stay {
		stays = append(stays, fmt.Sprintf("%s/stays-%06d", widgets.path("default"), i))
	}
	moving := startChurn(h, stays, widgets, gadgets, moths)

	const before, pauses = 100, 24
	moving.await(before)
	late := definition{plural: "lates", kind: "Late", versions: []string{"v1"}}
	pause, compacted := 0, 0
	dir := t.TempDir()
	w, err := backup.Create(dir, dumpID)
	if err != nil {
		t.Fatal(err)
	}
	last, gap, begun := int64(0), int64(stay*3/4/pauses), time.Now()
	err = c.Dump(t.Context(), w, engine.DumpOptions{}, func(p engine.BackupProgress) {
		if far := p.Objects - last; pause == pauses || max(far, -far) < gap {
			return
		}
		pause, last = pause+1, p.Objects
		moving.await(before + total*pause/pauses)
		if pause == 1 {
			h.define(late)
			h.put(late, "default", "appeared", "", "{}", "")
		}
		if pause%3 == 0 {
			r, err := etcd.Put(t.Context(), "compacted", "") // its own resourceVersion
			if err == nil {
				_, err = etcd.Compact(t.Context(), r.Header.Revision, clientv3.WithCompactPhysical())
			}
			if err != nil {
				t.Errorf("compact: %v", err)
			}
			compacted++
		}
	})
	took := time.Since(begun)
	moving.mu.Lock()
	done, changed := moving.done, moving.change
	moving.mu.Unlock()
	if cerr := moving.end(); cerr != nil || err != nil {
		t.Fatal(err, cerr)
	}
	if _, err := w.Commit(backup.Manifest{}); err != nil {
		t.Fatal(err)
	}
	b, err := backup.Open(dir, dumpID, backup.Keys{})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if err := b.Verify(t.Context(), nil); err != nil {
		t.Error(err)
	}
	has := map[string]map[string]int{} // by type and name
	there, not := 0, 0
	for _, typ := range b.Manifest().Types {
		if typ.Group != "shop.example.com" {
			continue
		}
		names := map[string]int{}
		for o, err := range saved(b, typ) { // which also says whether they are in order
			if err != nil {
				t.Fatal(err)
			}
			names[o.name]++
		}
		has[typ.Resource] = names
		a, b, wrong := moving.judge(typ, names)
		there, not = there+a, not+b
		if len(wrong) > 0 {
			t.Errorf("%s at %s: %d are wrong: %q", typ, typ.ResourceVersion, len(wrong), wrong[:min(5, len(wrong))])
		}
	}
	for plural, n := range map[string]int{"widgets": stay, "gadgets": stay / 50} {
		for i := range n {
			if name := fmt.Sprintf("stays-%06d", i); has[plural][name] != 1 {
				t.Errorf("%s %s stayed, and is in the backup %d times", plural, name, has[plural][name])
			}
		}
	}
	if has["lates"]["appeared"] != 1 {
		t.Errorf("of a kind that appeared there is %v", has["lates"])
	}
	if done < before+total || changed == 0 || there == 0 || not < total/2 || compacted == 0 || len(args) > 0 && seen.of[http.StatusGone] == 0 {
		t.Errorf("%d came and went, %d were changed, %d had to be in it, %d must not, %d compactions; the API server answered %v", done, changed, there, not, compacted, seen.of)
	}
	t.Logf("in %s, while a backup of %d objects was made, %d came and went, %d were changed, etcd was compacted %d times and lists expired %d times; %d of those that came had to be in it, %d must not", took.Round(time.Millisecond), b.Manifest().Objects, done, changed, compacted, seen.of[http.StatusGone], there, not)
}
