package infra_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	compute "google.golang.org/api/compute/v1"
	"google.golang.org/api/option"

	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest"
	"constellation/engine/cloud/cloudtest/wire"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/gcp/gcptest"
	gcpinfra "constellation/engine/cloud/gcp/infra"
	"constellation/engine/cloud/section"
	"constellation/engine/infra"
	"constellation/engine/plan"
	"constellation/engine/version"
)

const (
	uid     = "1a2b3c4d"
	account = "control-plane@demo-project.iam.gserviceaccount.com"
	workers = "worker@demo-project.iam.gserviceaccount.com"
)

// lab is an emulated cloud with an image, and clients of it.
type lab struct {
	*testing.T
	c *gcptest.Cloud
}

func start(t *testing.T, o gcptest.Options) *lab {
	t.Helper()
	if o.Fleet == nil {
		o.Fleet = &wire.Records{Boot: 10 * time.Second, Off: 10 * time.Second}
	}
	if o.Running == 0 {
		o.Pending, o.Running, o.Insert, o.Retry = 100*time.Millisecond, time.Second, time.Second, 10*time.Second
	}
	c, err := gcptest.New(func(p string) { t.Error(p) }, o)
	if err != nil {
		t.Fatal(err)
	}
	c.AddImage("one", "v1.1.0")
	return &lab{t, c}
}

// inBubble runs a test with a clock of its own.
func inBubble(t *testing.T, o gcptest.Options, test func(l *lab)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { test(start(t, o)) })
}

func request(edit func(*infra.Request)) infra.Request {
	r := infra.Request{
		Cluster: "demo", UID: uid, InitSecretHash: []byte(strings.Repeat("h", 32)), Image: version.MustParse("v1.1.0"),
		Config:  section.Values{"project": gcptest.Project, "zones": gcptest.Zones, "serviceAccount": account, "workerServiceAccount": workers, "sshFrom": []string{"198.51.100.7/32"}},
		Groups:  []infra.Group{{Name: "control-plane", Role: cloud.ControlPlane, Count: 1}, {Name: "workers", Role: cloud.Worker, Count: 4}},
		PodCIDR: netip.MustParsePrefix("10.244.0.0/16"), ServiceCIDR: netip.MustParsePrefix("10.96.0.0/12"),
	}
	if edit != nil {
		edit(&r)
	}
	return r
}

// open returns an infrastructure that remembers nothing, as in a new process.
func (l *lab) open(r infra.Request, client *http.Client) *gcpinfra.Infra {
	l.Helper()
	i, err := gcpinfra.New(context.WithoutCancel(l.Context()), r, gcp.Options{HTTP: client})
	if err != nil {
		l.Fatal(err)
	}
	return i
}

// events is a sink of reports.
type events struct {
	mu    sync.Mutex
	waits []string
}

// Send implements plan.Sink.
func (e *events) Send(ev plan.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if ev.Kind == plan.KindWait && ev.Text != "" {
		e.waits = append(e.waits, ev.Text)
	}
}
func (*events) SendPlan() error            { return nil }
func (*events) Hide(...[]byte)             {}
func (*events) SetNodes(int)               {}
func (*events) Forecast(func(*plan.Event)) {}

var _ plan.Sink = (*events)(nil)

// run executes steps as package engine does, and returns how many ran.
func run(ctx context.Context, steps []plan.Step, e *events) (ran int, err error) {
	for _, s := range steps {
		if s.Done != nil {
			done, err := s.Done(ctx)
			if err != nil {
				return ran, err
			}
			if done {
				continue
			}
		}
		if err := s.Run(ctx, plan.NewReporter(e, s.ID)); err != nil {
			return ran, fmt.Errorf("step %s: %w", s.ID, err)
		}
		ran++
	}
	return ran, nil
}

// create plans and runs `infra create`.
func create(ctx context.Context, i infra.Cloud, e *events) (ran int, err error) {
	objects, findings, err := i.Look(ctx)
	if err != nil {
		return 0, err
	}
	for _, f := range findings {
		if f.Severity == plan.Block {
			return 0, &plan.Error{Op: f.ID, Err: errors.New(f.Title), Remedy: f.Remedy}
		}
	}
	return run(ctx, infra.Create(i, objects), e)
}

func terminate(ctx context.Context, i infra.Cloud) error {
	objects, err := infra.Left(ctx, i)
	if err != nil {
		return err
	}
	_, err = run(ctx, infra.Terminate(i, uid, objects), &events{})
	return err
}

func (l *lab) mustCreate(r infra.Request) {
	l.Helper()
	if _, err := create(l.Context(), l.open(r, l.c.Client()), &events{}); err != nil {
		l.Fatal(err)
	}
}

// settled returns the objects without machines, whose names are random, and how many machines there are.
func (l *lab) settled() (objects []string, machines int) {
	for _, o := range l.c.Objects() {
		if strings.Contains(o, "/instances/") {
			machines++
		} else {
			objects = append(objects, o)
		}
	}
	return objects, machines
}

// changing counts the calls that change something.
func changing(calls map[string]int) (n int) {
	for method, count := range calls {
		verb := method[strings.LastIndexByte(method, '.')+1:]
		if slices.Contains([]string{"insert", "delete", "patch", "setLabels", "setNamedPorts", "createInstances", "deleteInstances"}, verb) {
			n += count
		}
	}
	return n
}

func (l *lab) api() *compute.Service {
	l.Helper()
	api, err := compute.NewService(l.Context(), option.WithHTTPClient(l.c.Client()))
	if err != nil {
		l.Fatal(err)
	}
	return api
}

func TestCreateAndTerminate(t *testing.T) {
	start(t, gcptest.Options{}) // reads the discovery document
	inBubble(t, gcptest.Options{}, func(l *lab) {
		l.mustCreate(request(nil))
		if n := changing(l.c.Calls()); n == 0 {
			l.Fatal("create changed nothing")
		}
		before := l.c.Calls()
		ran, err := create(l.Context(), l.open(request(nil), l.c.Client()), &events{})
		if n := changing(l.c.Calls()) - changing(before); err != nil || ran != 0 || n != 0 {
			l.Errorf("the second create ran %d steps with %d changes, %v", ran, n, err)
		}

		objects, _, err := l.open(request(nil), l.c.Client()).Look(l.Context())
		if err != nil {
			l.Fatal(err)
		}
		links := map[string]string{}
		for _, o := range objects {
			links[o.ID] = o.Link
		}
		for id, want := range map[string]string{
			"network":         "https://console.cloud.google.com/networking/networks/details/constellation-" + uid + "?project=demo-project",
			"group-workers-a": "https://console.cloud.google.com/compute/instanceGroups/details/" + gcptest.Zones[0] + "/" + gcp.GroupNameIn(uid, "workers", gcptest.Zones[0]) + "?project=demo-project",
			"health-check":    "",
		} {
			if links[id] != want {
				l.Errorf("the link of %s is %q, want %q; there are %v", id, links[id], want, links)
			}
		}

		control, err := gcp.New(l.Context(), gcp.Options{Project: gcptest.Project, UID: uid, Zones: gcptest.Zones, HTTP: l.c.Client()})
		if err != nil {
			l.Fatal(err)
		}
		groups, err := control.Groups(l.Context())
		if err != nil {
			l.Fatal(err)
		}
		sizes := map[string]int{}
		for _, g := range groups {
			sizes[g.Name] += g.Count
			if g.Image != "projects/demo-project/global/images/one" {
				l.Errorf("group %s has image %s", g.ID, g.Image)
			}
		}
		if want := map[string]int{"control-plane": 1, "workers": 4}; !maps.Equal(sizes, want) || len(groups) != 6 {
			l.Errorf("%d groups have %v machines, want 6 with %v", len(groups), sizes, want)
		}
		machines, err := control.Instances(l.Context())
		if err != nil || len(machines) != 5 {
			l.Fatalf("%d machines, %v", len(machines), err)
		}
		// Replacements get names of a token, so the base name leaves room for the longest.
		made, err := control.CreateInstances(l.Context(), machines[0].Group, []string{strings.Repeat("a", 24) + "-" + strings.Repeat("b", 16)})
		if err != nil || len(made) != 1 {
			l.Errorf("create a replacement: %v, %v", made, err)
		}
		if err := control.SetGroupImage(l.Context(), machines[0].Group, l.c.AddImage("two", "v1.2.0")); err != nil {
			l.Error(err)
		}
		for _, m := range machines {
			if m.State != cloud.Ready || !m.Role.Valid() {
				l.Errorf("machine %+v", m)
			}
		}

		if err := terminate(l.Context(), l.open(request(nil), l.c.Client())); err != nil {
			l.Fatal(err)
		}
		if left := l.c.Objects(); len(left) > 0 {
			l.Errorf("left: %v", left)
		}
		if err := terminate(l.Context(), l.open(request(nil), l.c.Client())); err != nil {
			l.Errorf("terminate again: %v", err)
		}
	})
}

// TestMachinesHaveTheirAttributes reads what the bootstrapper of a machine reads.
func TestMachinesHaveTheirAttributes(t *testing.T) {
	inBubble(t, gcptest.Options{}, func(l *lab) {
		l.mustCreate(request(nil))
		var all []*compute.Instance
		for _, zone := range gcptest.Zones {
			list, err := l.api().Instances.List(gcptest.Project, zone).Do()
			if err != nil {
				l.Fatal(err)
			}
			all = append(all, list.Items...)
		}
		for _, m := range all {
			meta := map[string]string{}
			for _, item := range m.Metadata.Items {
				meta[item.Key] = *item.Value
			}
			want := map[string]string{
				gcp.LabelUID: uid, gcp.LabelRole: m.Labels[gcp.LabelRole], gcp.AttributeLoadBalancer: "203.0.113.1", gcp.AttributeInitSecretHash: strings.Repeat("68", 32),
				gcp.AttributeZones: strings.Join(gcptest.Zones, " "), "block-project-ssh-keys": "false",
			}
			for name, value := range want {
				if got, ok := meta[name]; got != value || !ok {
					l.Errorf("machine %s has %s=%q, want %q", m.Name, name, meta[name], value)
				}
			}
			if value, is := meta[gcp.AttributeCloudProvider]; is {
				l.Errorf("machine %s has %s=%q without a cloud controller manager", m.Name, gcp.AttributeCloudProvider, value)
			}
			if want := map[string]string{"control-plane": account, "worker": workers}[m.Labels[gcp.LabelRole]]; len(m.ServiceAccounts) != 1 || m.ServiceAccounts[0].Email != want {
				l.Errorf("machine %s has accounts %+v, want %s", m.Name, m.ServiceAccounts, want)
			}
		}
		templates, err := l.api().InstanceTemplates.List(gcptest.Project).Do()
		if err != nil || len(templates.Items) != 2 {
			l.Fatalf("templates: %v", err)
		}
		for _, x := range templates.Items {
			if s := x.Properties.ShieldedInstanceConfig; s == nil || !s.EnableSecureBoot || !s.EnableVtpm || !s.EnableIntegrityMonitoring {
				l.Errorf("template %s has %+v", x.Name, s)
			}
		}
		out, err := l.open(request(nil), l.c.Client()).Outcome(l.Context())
		if err != nil || out.Host != "203.0.113.1" || out.NodeCIDR.String() != gcpinfra.DefaultNodeCIDR || out.Section.Text("uid") != uid {
			l.Errorf("outcome %+v, %v", out, err)
		}
	})
}

// TestCloudControllerManager has the kubelets of all groups wait for a cloud controller manager.
func TestCloudControllerManager(t *testing.T) {
	inBubble(t, gcptest.Options{}, func(l *lab) {
		l.mustCreate(request(func(r *infra.Request) {
			r.Config = maps.Clone(r.Config)
			r.Config["cloudControllerManager"] = true
		}))
		templates, err := l.api().InstanceTemplates.List(gcptest.Project).Do()
		if err != nil || len(templates.Items) != 2 {
			l.Fatalf("templates: %v", err)
		}
		for _, x := range templates.Items {
			if !slices.ContainsFunc(x.Properties.Metadata.Items, func(m *compute.MetadataItems) bool {
				return m.Key == "constellation-cloud-provider" && *m.Value == "external"
			}) {
				l.Errorf("template %s has no external cloud provider", x.Name)
			}
		}
		// A later change is a difference of both templates: machines that exist keep what they have.
		_, findings, err := l.open(request(nil), l.c.Client()).Look(l.Context())
		if err != nil || len(findings) != 2 || findings[0].Severity != plan.Warn || !strings.Contains(findings[0].Detail, "constellation-cloud-provider") {
			l.Errorf("findings %+v, %v", findings, err)
		}
	})
}

const stockReference = "projects/debian-cloud/global/images/debian-12-bookworm-v20260114"

// stockRequest is a request with a stock image, whose machines prepare themselves.
func stockRequest(edit func(*infra.Request)) infra.Request {
	return request(func(r *infra.Request) {
		r.Config = maps.Clone(r.Config)
		r.Config["images"] = []string{"v1.0.0=projects/debian-cloud/global/images/older", "v1.1.0=" + stockReference}
		r.Config["programs"] = "https://storage.googleapis.com/mine/v1.1.0"
		r.UserData, r.BootScript = "#cloud-config\n", "#!/bin/sh\n"
		if edit != nil {
			edit(r)
		}
	})
}

// TestStockImage makes machines with an image of another project, which get what prepares them.
func TestStockImage(t *testing.T) {
	inBubble(t, gcptest.Options{}, func(l *lab) {
		l.c.AddPublicImage("debian-cloud", "debian-12-bookworm-v20260114", "DEPRECATED")
		l.c.GrantOnly(permissions(l.T, "infra"))
		l.mustCreate(stockRequest(nil))
		templates, err := l.api().InstanceTemplates.List(gcptest.Project).Do()
		if err != nil || len(templates.Items) != 2 {
			l.Fatalf("templates: %v", err)
		}
		for _, x := range templates.Items {
			meta := map[string]string{}
			for _, m := range x.Properties.Metadata.Items {
				meta[m.Key] = *m.Value
			}
			if meta["user-data"] != "#cloud-config\n" || meta["startup-script"] != "#!/bin/sh\n" || x.Properties.Disks[0].InitializeParams.SourceImage != stockReference {
				l.Errorf("template %s has %v", x.Name, meta)
			}
		}
		objects, findings, err := l.open(stockRequest(nil), l.c.Client()).Look(l.Context())
		if err != nil || len(findings) > 0 {
			l.Errorf("findings %+v, %v", findings, err)
		}
		if !slices.ContainsFunc(objects, func(o infra.Object) bool {
			return slices.Contains(o.Details, "first boot: packages, units, and programs by their digests from https://storage.googleapis.com/mine/v1.1.0")
		}) {
			l.Error("no object describes the first boot")
		}
		// Another release of the programs is a difference of the templates, and its text is short.
		_, findings, err = l.open(stockRequest(func(r *infra.Request) { r.UserData += strings.Repeat("# another\n", 1000) }), l.c.Client()).Look(l.Context())
		if err != nil || len(findings) != 2 || !strings.Contains(findings[0].Detail, "user-data") || len(findings[0].Detail) > 1000 {
			l.Errorf("findings %+v, %v", findings, err)
		}
	})
}

// TestBadStockImages has what machines could not boot from, or would wait for.
func TestBadStockImages(t *testing.T) {
	for name, tt := range map[string]struct {
		edit func(*lab, *infra.Request)
		want string
	}{
		"no image": {func(*lab, *infra.Request) {}, "infra-image"},
		"an obsolete image": {func(l *lab, _ *infra.Request) {
			l.c.AddPublicImage("debian-cloud", "debian-12-bookworm-v20260114", "OBSOLETE")
		}, "infra-image"},
		"no programs": {func(l *lab, r *infra.Request) {
			l.c.AddPublicImage("debian-cloud", "debian-12-bookworm-v20260114", "")
			delete(r.Config, "programs")
		}, "infra-programs"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, gcptest.Options{}, func(l *lab) {
				r := stockRequest(nil)
				tt.edit(l, &r)
				_, findings, err := l.open(r, l.c.Client()).Look(l.Context())
				if err != nil || len(findings) != 1 || findings[0].ID != tt.want || findings[0].Severity != plan.Block || findings[0].Remedy == "" {
					l.Errorf("findings %+v, %v", findings, err)
				}
			})
		})
	}
}

// TestPlanIsWhatCreateMakes compares the list of a plan with the objects that exist after it.
func TestPlanIsWhatCreateMakes(t *testing.T) {
	inBubble(t, gcptest.Options{}, func(l *lab) {
		// Without a UID the plan is the same, and nothing is changed.
		first, findings, err := l.open(request(func(r *infra.Request) { r.UID, r.InitSecretHash = "", nil }), l.c.Client()).Look(l.Context())
		if err != nil || len(findings) > 0 || changing(l.c.Calls()) > 0 {
			l.Fatalf("%v, %v, %v", findings, err, l.c.Calls())
		}
		planned, _, err := l.open(request(nil), l.c.Client()).Look(l.Context())
		if err != nil {
			l.Fatal(err)
		}
		want := map[string]bool{}
		for n, o := range planned {
			if o.State != infra.Absent || first[n].State != infra.Absent || first[n].ID != o.ID || strings.ReplaceAll(first[n].Name, "UID", uid) != o.Name {
				l.Errorf("planned %+v and %+v", first[n], o)
			}
			want[o.Name] = true
		}
		l.mustCreate(request(nil))
		objects, _ := l.settled()
		got := map[string]bool{}
		for _, path := range objects {
			got[path[strings.LastIndexByte(path, '/')+1:]] = true
		}
		if len(objects) != len(planned) || !maps.Equal(got, want) {
			l.Errorf("create made %v, the plan had %v", slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want)))
		}
		after, findings, err := l.open(request(nil), l.c.Client()).Look(l.Context())
		if err != nil || len(findings) > 0 {
			l.Errorf("%v, %v", findings, err)
		}
		for _, o := range after {
			if o.State != infra.Exists {
				l.Errorf("%s is %s: %v", o, o.State, o.Differences)
			}
		}
	})
}

// cut is a transport that loses the answers from a call on, and ends the program's context there.
type cut struct {
	next http.RoundTripper
	end  context.CancelFunc

	mu   sync.Mutex
	left int
}

// RoundTrip implements http.RoundTripper.
func (c *cut) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := c.next.RoundTrip(r.WithContext(context.WithoutCancel(r.Context())))
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left--; c.left <= 0 {
		c.end()
		if err == nil {
			answer.Body.Close()
		}
		return nil, context.Canceled
	}
	return answer, err
}

// cutAt runs f with a client that is cut off after a number of calls. It reports whether f had fewer.
func (l *lab) cutAt(n int, r infra.Request, f func(ctx context.Context, i infra.Cloud) error) (complete bool) {
	l.Helper()
	ctx, cancel := context.WithCancel(l.Context())
	defer cancel()
	client := l.c.Client()
	client.Transport = &cut{next: client.Transport, end: cancel, left: n}
	err := f(ctx, l.open(r, client))
	if err == nil {
		return true
	}
	if ctx.Err() == nil {
		l.Fatalf("cut after %d calls: %v", n, err)
	}
	return false
}

// TestInterruptedAnywhere cuts create and terminate off after each call, and goes on in a new process.
func TestInterruptedAnywhere(t *testing.T) {
	start(t, gcptest.Options{})
	small := request(func(r *infra.Request) {
		r.Config = maps.Clone(r.Config)
		r.Config["zones"], r.Groups[1].Count = gcptest.Zones[:1], 2
		delete(r.Config, "sshFrom")
	})
	var want []string
	inBubble(t, gcptest.Options{}, func(l *lab) {
		l.mustCreate(small)
		want, _ = l.settled()
	})
	for late, step := range map[bool]int{false: 1, true: 7} {
		if testing.Short() {
			step = 17
		}
		o := gcptest.Options{LateConflicts: late}
		calls := 0
		for n, complete := 1, false; !complete; n += step {
			inBubble(t, o, func(l *lab) {
				complete = l.cutAt(n, small, func(ctx context.Context, i infra.Cloud) error { _, err := create(ctx, i, &events{}); return err })
				if n%2 == 0 { // a create that was cut off is undone
					if err := terminate(l.Context(), l.open(small, l.c.Client())); err != nil {
						l.Errorf("terminate after create was cut off after %d calls: %v", n, err)
					}
					time.Sleep(time.Minute) // an unfinished request would have made its object now
					if left := l.c.Objects(); len(left) > 0 {
						l.Errorf("create cut off after %d calls, then terminate: left %v", n, left)
					}
					return
				}
				l.mustCreate(small)
				if got, machines := l.settled(); !slices.Equal(got, want) || machines != 3 {
					l.Errorf("create cut off after %d calls: %d machines, %v, want %v", n, machines, got, want)
				}
			})
			calls = n
		}
		t.Logf("create was cut off after each of %d calls, late conflicts: %t", calls-1, late)
		for n, complete := 1, false; !complete; n += step {
			inBubble(t, o, func(l *lab) {
				l.mustCreate(small)
				complete = l.cutAt(n, small, func(ctx context.Context, i infra.Cloud) error { return terminate(ctx, i) })
				if err := terminate(l.Context(), l.open(small, l.c.Client())); err != nil {
					l.Errorf("terminate cut off after %d calls: %v", n, err)
				}
				if left := l.c.Objects(); len(left) > 0 {
					l.Errorf("terminate cut off after %d calls: left %v", n, left)
				}
			})
			calls = n
		}
		t.Logf("terminate was cut off after each of %d calls", calls-1)
	}
}

func TestTwoClusters(t *testing.T) {
	inBubble(t, gcptest.Options{}, func(l *lab) {
		other := request(func(r *infra.Request) {
			r.UID, r.Cluster = "1a2b3c4e", "other"
			r.Config = maps.Clone(r.Config)
		})
		l.mustCreate(other)
		before := l.c.Objects()
		l.mustCreate(request(nil))
		if err := terminate(l.Context(), l.open(request(nil), l.c.Client())); err != nil {
			l.Fatal(err)
		}
		if after := l.c.Objects(); !slices.Equal(after, before) {
			l.Errorf("the other cluster has %v, had %v", after, before)
		}
		if ran, err := create(l.Context(), l.open(other, l.c.Client()), &events{}); ran != 0 || err != nil {
			l.Errorf("create of the other cluster ran %d steps, %v", ran, err)
		}
	})
}

func TestForeignObjectsStay(t *testing.T) {
	inBubble(t, gcptest.Options{}, func(l *lab) {
		name := "constellation-" + uid
		region := "regions/europe-west3/"
		for key, object := range map[string]any{
			"global/networks/" + name:         &compute.Network{Description: "constellation-uid=" + uid + "0 cluster=demo"},
			region + "addresses/" + name:      &compute.Address{Address: "198.51.100.1", AddressType: "EXTERNAL", Labels: map[string]string{gcp.LabelUID: "other"}},
			"global/firewalls/" + name + "-x": &compute.Firewall{Description: "of " + uid},
		} {
			if err := l.c.Put(key, object); err != nil {
				l.Fatal(err)
			}
		}
		before := l.c.Objects()
		i := l.open(request(nil), l.c.Client())
		objects, findings, err := i.Look(l.Context())
		if err != nil {
			l.Fatal(err)
		}
		var taken []string
		for _, f := range findings {
			if f.ID == infra.FindingTaken && f.Severity == plan.Block {
				taken = append(taken, f.Title)
			}
		}
		if want := []string{"the name of network " + name + " is taken", "the name of address " + name + " in europe-west3 is taken"}; !slices.Equal(taken, want) {
			l.Errorf("findings %q, want %q", taken, want)
		}
		// A name that is taken after the plan was made stops create.
		if _, err := run(l.Context(), infra.Create(i, objects), &events{}); plan.ExitCode(err) != plan.ExitBlocked {
			l.Errorf("create: %v", err)
		}
		if err := i.Make(l.Context(), "network", func(string) {}); plan.ExitCode(err) != plan.ExitBlocked {
			l.Errorf("make: %v", err)
		}
		if err := i.Delete(l.Context(), infra.Object{Kind: "network", Name: name}, func(string) {}); err == nil {
			l.Error("a network without the UID was deleted")
		}
		if err := terminate(l.Context(), i); err != nil {
			l.Fatal(err)
		}
		if after := l.c.Objects(); !slices.Equal(after, before) || changing(l.c.Calls()) > 0 {
			l.Errorf("objects %v, were %v; calls %v", after, before, l.c.Calls())
		}
	})
}

// permissions returns those of a role.
func permissions(t *testing.T, name string) (out []string) {
	t.Helper()
	for _, r := range gcpinfra.Roles(section.Values{"project": "demo-project", "serviceAccount": account}) {
		if r.Name == name {
			for _, p := range r.Rights {
				out = append(out, p.Permission)
			}
		}
	}
	if len(out) == 0 {
		t.Fatalf("there is no role %s", name)
	}
	return out
}

// life creates, looks at and terminates an infrastructure. A machine is taken out of its group in between.
func life(ctx context.Context, l *lab, i infra.Cloud) error {
	objects, findings, err := i.Look(ctx)
	if err != nil {
		return err
	}
	for _, f := range findings {
		if f.Severity == plan.Block {
			return &plan.Error{Op: f.ID, Err: errors.New(f.Title), Remedy: f.Remedy}
		}
	}
	if _, err := run(ctx, infra.Create(i, objects), &events{}); err != nil {
		return err
	}
	for _, o := range l.c.Objects() {
		if _, name, ok := strings.Cut(o, "/instances/"); ok {
			l.c.Abandon(name)
			break
		}
	}
	return terminate(ctx, i)
}

// TestLeastRoleSuffices runs a whole life with the permissions of the printed role, and compares its methods with the
// calls.
func TestLeastRoleSuffices(t *testing.T) {
	inBubble(t, gcptest.Options{}, func(l *lab) {
		l.c.GrantOnly(permissions(l.T, "infra"))
		if err := life(l.Context(), l, l.open(request(nil), l.c.Client())); err != nil {
			l.Fatal(err)
		}
		methods := map[string]bool{}
		for _, role := range gcpinfra.Roles(section.Values{}) {
			if role.Name == "infra" {
				for _, r := range role.Rights {
					for _, m := range r.Methods {
						methods["compute."+m] = true
					}
				}
			}
		}
		for m := range l.c.Calls() {
			if !methods[m] {
				l.Errorf("the role lacks method %s", m)
			}
			delete(methods, m)
		}
		if len(methods) > 0 {
			l.Errorf("nothing calls %v", slices.Sorted(maps.Keys(methods)))
		}
		if left := l.c.Objects(); len(left) > 0 {
			l.Errorf("left: %v", left)
		}
	})
}

func TestControlPlaneRoleSuffices(t *testing.T) {
	c, err := gcptest.New(func(p string) { t.Error(p) }, gcptest.Options{
		Fleet: &wire.Records{Boot: 20 * time.Millisecond, Off: 20 * time.Millisecond}, Pending: time.Millisecond, Running: time.Millisecond, Insert: 10 * time.Millisecond, Retry: 10 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	old, next := c.AddImage("one", "v1.0.0"), c.AddImage("two", "v1.1.0")
	group := c.AddGroup(gcptest.Zones[0], "workers", cloud.Worker, old, gcptest.UID, nil)
	c.GrantOnly(permissions(t, "control-plane"))
	p, err := gcp.New(t.Context(), gcp.Options{Project: gcptest.Project, UID: gcptest.UID, Zones: gcptest.Zones, HTTP: c.Client()})
	if err != nil {
		t.Fatal(err)
	}
	cloudtest.Run(t, cloudtest.Options{Cloud: p, Group: group, Unknown: gcp.ProviderID(gcptest.Project, gcptest.Zones[0], "workers-none"), Images: []string{old, next}, Within: 20 * time.Second})
}

// TestRoleOfTheDriverOfDisks has the permissions of the driver only where a configuration switches it on.
func TestRoleOfTheDriverOfDisks(t *testing.T) {
	for _, on := range []bool{false, true} {
		for _, r := range gcpinfra.Roles(section.Values{"project": "demo-project", "serviceAccount": account, "persistentDisksChart": on}) {
			has := slices.ContainsFunc(r.Rights, func(x infra.Right) bool { return x.Permission == "compute.instances.attachDisk" })
			bound := strings.Contains(r.Text, "roles/compute.storageAdmin") && strings.Contains(r.Text, "- compute.instances.detachDisk\n")
			if want := on && r.Name == "control-plane"; has != want || bound != want {
				t.Errorf("with the driver %t, role %s has it: %t, and its text: %t", on, r.Name, has, bound)
			}
		}
	}
}

// TestWorkerRoleSuffices has a worker read a machine, and no list of machines.
func TestWorkerRoleSuffices(t *testing.T) {
	inBubble(t, gcptest.Options{}, func(l *lab) {
		l.mustCreate(request(nil))
		var name string
		for _, o := range l.c.Objects() {
			if _, n, ok := strings.Cut(o, "zones/"+gcptest.Zones[0]+"/instances/"); ok {
				name = n
			}
		}
		l.c.GrantOnly(permissions(l.T, "worker"))
		if _, err := l.api().Instances.Get(gcptest.Project, gcptest.Zones[0], name).Do(); err != nil {
			l.Error(err)
		}
		if _, err := l.api().Instances.List(gcptest.Project, gcptest.Zones[0]).Do(); err == nil {
			l.Error("a worker lists machines")
		}
	})
}

// TestEachMissingPermission takes one permission of the role after the other.
func TestEachMissingPermission(t *testing.T) {
	for _, p := range permissions(t, "infra") {
		t.Run(p, func(t *testing.T) {
			inBubble(t, gcptest.Options{}, func(l *lab) {
				l.c.Revoke(p)
				err := life(l.Context(), l, l.open(request(nil), l.c.Client()))
				if err == nil || !strings.Contains(err.Error()+plan.Remedy(err), p) {
					l.Errorf("%v; %s, want one that names %s", err, plan.Remedy(err), p)
				}
				l.c.Grant(p)
				if err := terminate(l.Context(), l.open(request(nil), l.c.Client())); err != nil {
					l.Error(err)
				}
				if left := l.c.Objects(); len(left) > 0 {
					l.Errorf("left: %v", left)
				}
			})
		})
	}
}

func TestChangedObjectsAreReportedAndStay(t *testing.T) {
	inBubble(t, gcptest.Options{}, func(l *lab) {
		l.mustCreate(request(nil))
		name := "constellation-" + uid
		if err := l.c.Put("global/firewalls/"+name+"-health", &compute.Firewall{
			Description: "constellation-uid=" + uid + " cluster=demo", Network: "projects/demo-project/global/networks/" + name, Direction: "INGRESS", SourceRanges: []string{"0.0.0.0/0"},
			TargetTags: []string{name + "-control-plane"}, Allowed: []*compute.FirewallAllowed{{IPProtocol: "tcp", Ports: []string{"6443"}}},
		}); err != nil {
			l.Fatal(err)
		}
		before := changing(l.c.Calls())
		i := l.open(request(nil), l.c.Client())
		objects, findings, err := i.Look(l.Context())
		if err != nil || len(findings) != 1 || findings[0].Severity != plan.Warn || !strings.Contains(findings[0].Detail, `sourceRanges has "0.0.0.0/0"`) {
			l.Errorf("findings %+v, %v", findings, err)
		}
		if ran, err := run(l.Context(), infra.Create(i, objects), &events{}); ran != 0 || err != nil || changing(l.c.Calls()) != before {
			l.Errorf("create ran %d steps, %v", ran, err)
		}
		// Another image, number of machines or template of the operator is no difference.
		i = l.open(request(func(r *infra.Request) { r.Groups[1].Count, r.Image = 7, version.MustParse("v1.2.0") }), l.c.Client())
		l.c.AddImage("two", "v1.2.0")
		if _, findings, err = i.Look(l.Context()); err != nil || len(findings) != 1 {
			l.Errorf("findings %+v, %v", findings, err)
		}
	})
}

// TestBadConfigurations checks what the plan reports of the configuration and of objects that it names.
func TestBadConfigurations(t *testing.T) {
	const region = "regions/europe-west3/"
	with := func(values section.Values) func(*infra.Request) {
		return func(r *infra.Request) {
			r.Config = maps.Clone(r.Config)
			maps.Copy(r.Config, values)
		}
	}
	own := section.Values{"network": "mine", "subnetwork": "mine"}
	for _, tt := range []struct {
		name string
		edit func(*infra.Request)
		put  map[string]any
		want string // title of the only finding; empty: none
	}{
		{name: "zones of two regions", edit: func(r *infra.Request) {
			r.Config = section.Values{"project": gcptest.Project, "zones": []string{"europe-west3-a", "europe-west4-a"}, "serviceAccount": account, "workerServiceAccount": workers}
		}, want: "zone europe-west4-a is not in region europe-west3"},
		{name: "other zones than create had", edit: func(r *infra.Request) { r.Known = section.Values{"zones": []string{"europe-west3-b"}} }, want: "zones are europe-west3-a, europe-west3-b, europe-west3-c, and were europe-west3-b when create began"},
		{name: "no account", edit: with(section.Values{"serviceAccount": ""}), want: "no service account of control planes is configured"},
		{name: "no account of workers", edit: with(section.Values{"workerServiceAccount": ""}), want: "no service account of workers is configured"},
		{name: "one account of all", edit: with(section.Values{"workerServiceAccount": account}), want: "control planes and workers have one service account"},
		{name: "a machine type that the zones lack", edit: with(section.Values{"workerMachineType": "c4-standard-2", "zones": []string{"europe-west3-a"}}), want: "zone europe-west3-a has no machine type c4-standard-2"},
		{name: "an image that the project lacks", edit: func(r *infra.Request) { r.Image = version.MustParse("v1.3.0") }, want: "project demo-project has no image v1.3.0"},
		{name: "pods in the range of machines", edit: with(section.Values{"nodeCIDR": "10.244.8.0/24"}), want: "the range of machines 10.244.8.0/24 overlaps podCIDR 10.244.0.0/16"},
		{name: "proxies in the range of machines", edit: with(section.Values{"proxyCIDR": "10.128.4.0/23"}), want: "the range of proxies 10.128.4.0/23 overlaps nodeCIDR 10.128.0.0/20"},
		{name: "proxies in a subnetwork of the own network", edit: with(section.Values{"network": "mine", "subnetwork": "mine"}), put: map[string]any{
			"global/networks/mine":       &compute.Network{},
			region + "subnetworks/mine":  &compute.Subnetwork{Network: "projects/demo-project/global/networks/mine", IpCidrRange: "10.1.0.0/20", SecondaryIpRanges: []*compute.SubnetworkSecondaryRange{{RangeName: "p", IpCidrRange: "10.244.0.0/16"}}},
			region + "subnetworks/other": &compute.Subnetwork{Network: "projects/demo-project/global/networks/mine", IpCidrRange: "10.128.0.0/16"},
		}, want: "the range of proxies 10.128.16.0/23 overlaps subnetwork other 10.128.0.0/16"},
		{name: "a long name of a group", edit: func(r *infra.Request) { r.Groups[1].Name = strings.Repeat("w", 40) }, want: "the name of group " + strings.Repeat("w", 40) + " has 40 characters, and names in the cloud have room for 38"},
		{name: "a network without a subnetwork", edit: with(section.Values{"network": "mine"}), put: map[string]any{"global/networks/mine": &compute.Network{}}, want: "network and subnetwork belong together"},
		{name: "a network that does not exist", edit: with(own), put: map[string]any{
			"global/networks/other":        &compute.Network{},
			region + "subnetworks/mine":    &compute.Subnetwork{Network: "projects/demo-project/global/networks/mine", IpCidrRange: "10.1.0.0/20", SecondaryIpRanges: []*compute.SubnetworkSecondaryRange{{RangeName: "p", IpCidrRange: "10.244.0.0/16"}}},
			region + "subnetworks/another": &compute.Subnetwork{},
		}, want: "network mine does not exist"},
		{name: "a subnetwork that does not exist", edit: with(own), put: map[string]any{"global/networks/mine": &compute.Network{}}, want: "subnetwork mine does not exist"},
		{name: "a subnetwork of another network", edit: with(own), put: map[string]any{
			"global/networks/mine":      &compute.Network{},
			region + "subnetworks/mine": &compute.Subnetwork{Network: "projects/demo-project/global/networks/other", IpCidrRange: "10.1.0.0/20", SecondaryIpRanges: []*compute.SubnetworkSecondaryRange{{RangeName: "p", IpCidrRange: "10.244.0.0/16"}}},
		}, want: "subnetwork mine is not of network mine"},
		{name: "a subnetwork without a range of pods", edit: with(own), put: map[string]any{
			"global/networks/mine":      &compute.Network{},
			region + "subnetworks/mine": &compute.Subnetwork{Network: "projects/demo-project/global/networks/mine", IpCidrRange: "10.1.0.0/20"},
		}, want: "subnetwork mine has no secondary range 10.244.0.0/16"},
		{name: "an address that does not exist", edit: with(section.Values{"address": "mine"}), want: "address mine does not exist"},
		{name: "an internal address", edit: with(section.Values{"address": "mine"}), put: map[string]any{region + "addresses/mine": &compute.Address{Address: "10.0.0.9", AddressType: "INTERNAL"}}, want: "address mine is not external"},
		{name: "an address that is in use", edit: with(section.Values{"address": "mine"}), put: map[string]any{
			region + "addresses/mine":        &compute.Address{Address: "198.51.100.9", AddressType: "EXTERNAL"},
			region + "forwardingRules/other": &compute.ForwardingRule{IPAddress: "198.51.100.9"},
		}, want: "address mine is in use"},
		{name: "own proxies", edit: with(section.Values{"network": "mine", "subnetwork": "mine", "address": "mine"}), put: map[string]any{
			"global/networks/mine":         &compute.Network{},
			region + "addresses/mine":      &compute.Address{Address: "198.51.100.9", AddressType: "EXTERNAL"},
			region + "subnetworks/mine":    &compute.Subnetwork{Network: "projects/demo-project/global/networks/mine", IpCidrRange: "10.1.0.0/20", SecondaryIpRanges: []*compute.SubnetworkSecondaryRange{{RangeName: "p", IpCidrRange: "10.244.0.0/16"}}},
			region + "subnetworks/proxies": &compute.Subnetwork{Network: "projects/demo-project/global/networks/mine", IpCidrRange: "10.1.64.0/23", Purpose: "REGIONAL_MANAGED_PROXY", Role: "ACTIVE"},
		}},
		{name: "own objects that fit", edit: with(section.Values{"network": "mine", "subnetwork": "mine", "address": "mine"}), put: map[string]any{
			"global/networks/mine":      &compute.Network{},
			region + "addresses/mine":   &compute.Address{Address: "198.51.100.9", AddressType: "EXTERNAL"},
			region + "subnetworks/mine": &compute.Subnetwork{Network: "projects/demo-project/global/networks/mine", IpCidrRange: "10.1.0.0/20", SecondaryIpRanges: []*compute.SubnetworkSecondaryRange{{RangeName: "p", IpCidrRange: "10.244.0.0/16"}}},
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, gcptest.Options{}, func(l *lab) {
				for key, o := range tt.put {
					if err := l.c.Put(key, o); err != nil {
						l.Fatal(err)
					}
				}
				if strings.Contains(tt.want, "machine type") {
					for _, z := range gcptest.Zones {
						l.c.Withhold(z, "c4-standard-2")
					}
				}
				r := request(tt.edit)
				_, findings, err := l.open(r, l.c.Client()).Look(l.Context())
				var got []string
				for _, f := range findings {
					if f.Severity == plan.Block {
						got = append(got, f.Title)
						if f.Remedy == "" || !strings.HasPrefix(f.ID, "infra-") {
							l.Errorf("finding %+v has no remedy or no ID", f)
						}
					}
				}
				if tt.name == "zones of two regions" { // the emulator has no such zone
					got = slices.DeleteFunc(got, func(s string) bool { return strings.Contains(s, "machine type") })
				}
				if want := slices.DeleteFunc([]string{tt.want}, func(s string) bool { return s == "" }); !slices.Equal(got, want) && err == nil || err != nil && tt.name != "zones of two regions" {
					l.Errorf("findings %q, %v, want %q", got, err, want)
				}
				if tt.want != "" {
					return
				}
				before := l.c.Objects()
				l.mustCreate(r)
				if out, err := l.open(r, l.c.Client()).Outcome(l.Context()); err != nil || out.Host != "198.51.100.9" || out.NodeCIDR.String() != "10.1.0.0/20" {
					l.Errorf("outcome %+v, %v", out, err)
				}
				if err := terminate(l.Context(), l.open(r, l.c.Client())); err != nil {
					l.Fatal(err)
				}
				if after := l.c.Objects(); !slices.Equal(after, before) {
					l.Errorf("left %v, want %v", after, before)
				}
			})
		})
	}
}

// TestInjectedFaults has the cloud throttle, fail and run out of machines during create.
func TestInjectedFaults(t *testing.T) {
	for _, tt := range []struct {
		name string
		luck func(l *lab)
		wait string
	}{
		{name: "it throttles", luck: func(l *lab) {
			l.c.Refuse("compute.subnetworks.insert", 2, gcptest.Refusal(http.StatusForbidden, "rateLimitExceeded", "Quota exceeded"))
		}, wait: "rateLimitExceeded"},
		{name: "it fails for a while", luck: func(l *lab) {
			l.c.Refuse("compute.addresses.insert", 4, gcptest.Refusal(http.StatusServiceUnavailable, "backendError", "Backend Error"))
		}, wait: "backendError"},
		{name: "a zone has no machines for a while", luck: func(l *lab) {
			l.c.SetStockout("europe-west3-b", true)
			time.AfterFunc(5*time.Minute, func() { l.c.SetStockout("europe-west3-b", false) })
		}, wait: "zone europe-west3-b: create cconstellation"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, gcptest.Options{}, func(l *lab) {
				tt.luck(l)
				var e events
				if _, err := create(l.Context(), l.open(request(nil), l.c.Client()), &e); err != nil {
					l.Fatal(err)
				}
				if !slices.ContainsFunc(e.waits, func(s string) bool { return strings.Contains(s, strings.Split(tt.wait, ": ")[0]) }) {
					l.Errorf("waits %q, want %q", e.waits, tt.wait)
				}
				if _, machines := l.settled(); machines != 5 {
					l.Errorf("%d machines", machines)
				}
			})
		})
	}
}

func TestForeignUIDIsRefused(t *testing.T) {
	_, err := gcpinfra.New(t.Context(), request(func(r *infra.Request) { r.UID = "prod" }), gcp.Options{HTTP: http.DefaultClient})
	if plan.ExitCode(err) != plan.ExitUsage || plan.Remedy(err) == "" {
		t.Errorf("error %v", err)
	}
}

// addressed gives machines addresses of the subnetwork.
type addressed struct{ *wire.Records }

// Start implements wire.Fleet.
func (f addressed) Start(m wire.Machine) (wire.Place, error) {
	p, err := f.Records.Start(m)
	if at := p.IP.As4(); err == nil {
		p.IP = netip.AddrFrom4([4]byte{10, 128, 0, at[3]})
	}
	return p, err
}

// TestControlPlanesJoinThroughTheLoadBalancer follows three control planes, and a replacement, through the emulated load
// balancer. Each of them reaches another API server before its own runs.
func TestControlPlanesJoinThroughTheLoadBalancer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := start(t, gcptest.Options{Fleet: addressed{&wire.Records{Boot: 10 * time.Second, Off: 10 * time.Second}}})
		l.mustCreate(request(func(r *infra.Request) { r.Groups[0].Count = 3 }))
		control, err := gcp.New(l.Context(), gcp.Options{Project: gcptest.Project, UID: uid, Zones: gcptest.Zones, HTTP: l.c.Client()})
		if err != nil {
			l.Fatal(err)
		}
		machines, err := control.Instances(l.Context())
		if err != nil {
			l.Fatal(err)
		}
		var planes, others []cloud.Instance
		listening := map[string]bool{}
		at := func(machine string, port int) string { return fmt.Sprintf("%s:%d", machine, port) }
		for _, m := range machines {
			if m.Role == cloud.ControlPlane {
				planes = append(planes, m)
			} else {
				others = append(others, m)
			}
			listening[at(m.Name, infra.InitPort)] = true // bootstrappers wait
		}
		const outside = "198.51.100.7"
		host, proxies := netip.MustParseAddr("203.0.113.1"), netip.MustParsePrefix(gcpinfra.DefaultProxyCIDR)
		reach := func(from string, port int) (out []string) {
			for _, r := range l.c.Connect(from, host, port, func(m string, p int) bool { return listening[at(m, p)] }) {
				if r.Port != port || !proxies.Contains(r.Source) {
					l.Errorf("machine %s gets a connection at port %d from %v", r.Machine, r.Port, r.Source)
				}
				out = append(out, r.Machine)
			}
			return out
		}
		want := func(what string, got []string, want ...string) {
			l.Helper()
			slices.Sort(want)
			if !slices.Equal(got, want) {
				l.Errorf("%s: reached %v, want %v", what, got, want)
			}
		}
		if len(planes) != 3 || len(others) != 4 {
			l.Fatalf("%d control planes, %d others", len(planes), len(others))
		}
		want("init", reach(outside, infra.InitPort), planes[0].Name, planes[1].Name, planes[2].Name)
		want("an API server before init", reach(outside, infra.APIPort))
		var members []string
		join := func(m cloud.Instance) {
			l.Helper()
			delete(listening, at(m.Name, infra.InitPort))
			listening[at(m.Name, infra.APIPort)], listening[at(m.Name, infra.JoinPort)] = true, true
			members = append(members, m.Name)
		}
		join(planes[0]) // init
		for _, p := range planes[1:] {
			want(p.Name+" asks for a ticket", reach(p.Name, infra.JoinPort), members...)
			want(p.Name+" joins", reach(p.Name, infra.APIPort), members...)
			join(p)
		}
		for _, from := range []string{outside, others[0].Name, planes[0].Name} {
			want("an API server from "+from, reach(from, infra.APIPort), members...)
		}
		want("init again", reach(outside, infra.InitPort))
		// One whose own API server is down reaches the others.
		delete(listening, at(planes[0].Name, infra.APIPort))
		want("an API server is down", reach(planes[0].Name, infra.APIPort), planes[1].Name, planes[2].Name)
		made, err := control.CreateInstances(l.Context(), planes[0].Group, []string{strings.Repeat("a", 24)})
		if err != nil || len(made) != 1 {
			l.Fatalf("create a replacement: %v, %v", made, err)
		}
		time.Sleep(time.Minute)
		want("the replacement joins", reach(made[0].Name, infra.APIPort), planes[1].Name, planes[2].Name)
		// Around the load balancer, only machines of the cluster reach a port.
		direct := func(from string) int {
			return len(l.c.Connect(from, planes[1].IP, infra.APIPort, func(m string, p int) bool { return listening[at(m, p)] }))
		}
		if direct(outside) != 0 || direct(others[0].Name) != 1 {
			l.Errorf("around the load balancer, %d connections from outside and %d of a worker", direct(outside), direct(others[0].Name))
		}
	})
}

// TestNamedPortsAreSetAgain removes one of the named ports, and adds another, as somebody else could.
func TestNamedPortsAreSetAgain(t *testing.T) {
	inBubble(t, gcptest.Options{}, func(l *lab) {
		l.mustCreate(request(nil))
		zone, name := gcptest.Zones[0], gcp.GroupNameIn(uid, "control-plane", gcptest.Zones[0])
		o, err := l.api().InstanceGroups.SetNamedPorts(gcptest.Project, zone, name, &compute.InstanceGroupsSetNamedPortsRequest{NamedPorts: []*compute.NamedPort{{Name: "api", Port: 6443}, {Name: "mine", Port: 80}}}).Do()
		if err != nil {
			l.Fatal(err)
		}
		if _, err := l.api().ZoneOperations.Wait(gcptest.Project, zone, o.Name).Do(); err != nil {
			l.Fatal(err)
		}
		if ran, err := create(l.Context(), l.open(request(nil), l.c.Client()), &events{}); ran != 1 || err != nil {
			l.Errorf("create ran %d steps, %v", ran, err)
		}
		g, err := l.api().InstanceGroupManagers.Get(gcptest.Project, zone, name).Do()
		if err != nil {
			l.Fatal(err)
		}
		got := map[string]int64{}
		for _, p := range g.NamedPorts {
			got[p.Name] = p.Port
		}
		if want := map[string]int64{"api": 6443, "init": 9000, "join": 30090, "mine": 80}; !maps.Equal(got, want) {
			l.Errorf("named ports %v, want %v", got, want)
		}
	})
}

// TestEarlierLoadBalancer has the objects of a passthrough load balancer, as earlier versions made it.
func TestEarlierLoadBalancer(t *testing.T) {
	inBubble(t, gcptest.Options{}, func(l *lab) {
		name, mark := "constellation-"+uid, "constellation-uid="+uid+" cluster=demo"
		region := "regions/europe-west3/"
		for key, object := range map[string]any{
			"global/networks/" + name:           &compute.Network{Description: mark},
			region + "addresses/" + name:        &compute.Address{Description: mark, Address: "203.0.113.9", AddressType: "EXTERNAL", Labels: map[string]string{gcp.LabelUID: uid}},
			region + "healthChecks/" + name:     &compute.HealthCheck{Description: mark},
			region + "backendServices/" + name:  &compute.BackendService{Description: mark, LoadBalancingScheme: "EXTERNAL", HealthChecks: []string{"projects/demo-project/" + region + "healthChecks/" + name}},
			region + "forwardingRules/" + name:  &compute.ForwardingRule{Description: mark, LoadBalancingScheme: "EXTERNAL", IPAddress: "203.0.113.9", Ports: []string{"6443", "9000", "30090"}, BackendService: "projects/demo-project/" + region + "backendServices/" + name},
			region + "forwardingRules/of-other": &compute.ForwardingRule{IPAddress: "203.0.113.10"},
		} {
			if err := l.c.Put(key, object); err != nil {
				l.Fatal(err)
			}
		}
		_, err := create(l.Context(), l.open(request(nil), l.c.Client()), &events{})
		if err == nil || !strings.Contains(plan.Remedy(err), "infra terminate") || changing(l.c.Calls()) > 0 {
			l.Errorf("create: %v; %s", err, plan.Remedy(err))
		}
		if err := terminate(l.Context(), l.open(request(nil), l.c.Client())); err != nil {
			l.Fatal(err)
		}
		if left := l.c.Objects(); !slices.Equal(left, []string{region + "forwardingRules/of-other"}) {
			l.Errorf("left: %v", left)
		}
		l.mustCreate(request(nil))
	})
}

// An API that does not answer, as without a network, is an error with a remedy.
func TestNoAnswer(t *testing.T) {
	start(t, gcptest.Options{}) // reads the discovery document
	inBubble(t, gcptest.Options{}, func(l *lab) {
		refused := &http.Client{Transport: roundTripper(func(*http.Request) (*http.Response, error) { return nil, errors.New("connection refused") })}
		_, _, err := l.open(request(nil), refused).Look(infra.Hasty(l.Context()))
		if !errors.Is(err, cloud.ErrUnavailable) || !strings.Contains(plan.Remedy(err), "check the network") {
			l.Errorf("error %v with the remedy %q", err, plan.Remedy(err))
		}
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
