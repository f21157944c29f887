package gcp_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	compute "google.golang.org/api/compute/v1"

	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest"
	"constellation/engine/cloud/cloudtest/wire"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/gcp/api"
	"constellation/engine/cloud/gcp/gcptest"
	"constellation/engine/cloud/providers"
	"constellation/engine/version"
)

var (
	_ providers.Control = (*gcp.Cloud)(nil)
	_ providers.Console = gcp.Console{}
)

const zone = "europe-west3-a"

// lab is an emulated cloud with a group of workers in each zone, and the provider.
type lab struct {
	*testing.T
	c     *gcptest.Cloud
	p     *gcp.Cloud
	group string // in zone
	old   string // images
	next  string
}

func start(t *testing.T, o gcptest.Options) *lab {
	t.Helper()
	if o.Fleet == nil {
		o.Fleet = &wire.Records{Boot: 30 * time.Second, Off: 20 * time.Second}
	}
	c, err := gcptest.New(func(p string) { t.Error(p) }, o)
	if err != nil {
		t.Fatal(err)
	}
	l := &lab{T: t, c: c, old: c.AddImage("one", "v1.0.0"), next: c.AddImage("two", "v1.1.0"), group: gcp.GroupID(gcptest.Project, zone, "workers")}
	for _, z := range gcptest.Zones {
		c.AddGroup(z, "workers", cloud.Worker, l.old, gcptest.UID, nil)
	}
	c.AddGroup(zone, "control-planes", cloud.ControlPlane, l.old, gcptest.UID, nil)
	c.AddGroup(zone, "foreign", cloud.Worker, l.old, "another-cluster", nil)
	l.p = l.provider()
	return l
}

// provider returns a provider that remembers nothing, as after a restart.
func (l *lab) provider() *gcp.Cloud {
	l.Helper()
	p, err := gcp.New(l.Context(), gcp.Options{Project: gcptest.Project, UID: gcptest.UID, Zones: gcptest.Zones, HTTP: l.c.Client()})
	if err != nil {
		l.Fatal(err)
	}
	return p
}

func (l *lab) create(group string, tokens ...string) []cloud.Instance {
	l.Helper()
	made, err := l.p.CreateInstances(l.Context(), group, tokens)
	if err != nil || len(made) != len(tokens) {
		l.Fatalf("create: %+v, %v", made, err)
	}
	return made
}

func (l *lab) delete(keys ...string) {
	l.Helper()
	if err := l.p.DeleteInstances(l.Context(), keys); err != nil {
		l.Fatal(err)
	}
}

// read returns a machine by its key.
func (l *lab) read(key string) cloud.Instance {
	l.Helper()
	i, err := l.p.Instance(l.Context(), key)
	if err != nil {
		l.Fatal(err)
	}
	return i
}

func (l *lab) gone(key string) {
	l.Helper()
	if i, err := l.p.Instance(l.Context(), key); !errors.Is(err, cloud.ErrNotFound) {
		l.Errorf("machine %+v, %v, want cloud.ErrNotFound", i, err)
	}
}

func token(n int) string { return fmt.Sprintf("%024x", n+1) }

// inBubble runs a test with a clock of its own.
func inBubble(t *testing.T, o gcptest.Options, test func(l *lab)) {
	t.Helper()
	start(t, gcptest.Options{}) // reads the discovery document, which runs a program
	synctest.Test(t, func(t *testing.T) { test(start(t, o)) })
}

var slow = gcptest.Options{Pending: 500 * time.Millisecond, Running: time.Second, Insert: 4 * time.Second, Retry: 30 * time.Second}

// TestConforms runs the suite of all clouds over loopback, with the credentials of a machine.
func TestConforms(t *testing.T) {
	for _, tt := range []struct {
		name string
		o    gcptest.Options
	}{
		{"taken names fail the request", gcptest.Options{}},
		{"taken names fail the operation, and pages are small", gcptest.Options{LateConflicts: true, Page: 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o := tt.o
			o.Fleet = &wire.Records{Boot: 20 * time.Millisecond, Off: 20 * time.Millisecond}
			o.Pending, o.Running, o.Insert, o.Retry = time.Millisecond, time.Millisecond, 10*time.Millisecond, 10*time.Millisecond
			l := start(t, o)
			api, metadata := httptest.NewServer(l.c), httptest.NewServer(l.c.Metadata())
			t.Cleanup(api.Close)
			t.Cleanup(metadata.Close)
			t.Setenv("HOME", t.TempDir())
			t.Setenv("GOOGLE_APPLICATION_CREDENTIALS", "")
			t.Setenv("GCE_METADATA_HOST", strings.TrimPrefix(metadata.URL, "http://"))
			p, err := gcp.New(t.Context(), gcp.Options{Project: gcptest.Project, UID: gcptest.UID, Zones: gcptest.Zones, Endpoint: api.URL + "/compute/v1/"})
			if err != nil {
				t.Fatal(err)
			}
			cloudtest.Run(t, cloudtest.Options{
				Cloud: p, Group: l.group, Unknown: gcp.ProviderID(gcptest.Project, zone, "workers-none"), Images: []string{l.old, l.next}, Within: 20 * time.Second,
			})
			t.Logf("calls: %v", l.c.Calls())
		})
	}
}

func TestKeyOfAServiceAccountIsRefused(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key.json")
	if err := os.WriteFile(file, []byte(`{"type":"service_account","client_email":"a@demo-project.iam.gserviceaccount.com","private_key_id":"1","private_key":"SECRET","token_uri":"https://oauth2.googleapis.com/token"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("GOOGLE_APPLICATION_CREDENTIALS", file)
	_, err := gcp.New(t.Context(), gcp.Options{Project: gcptest.Project, UID: gcptest.UID, Zones: gcptest.Zones})
	if !errors.Is(err, cloud.ErrDenied) || !strings.Contains(err.Error(), "workload identity federation") || strings.Contains(err.Error(), "SECRET") {
		t.Errorf("error %v", err)
	}
}

// TestErrors sends each error of the table, and checks its kind and its remedy.
func TestErrors(t *testing.T) {
	for _, tt := range []struct {
		name, reason, message string
		status                int
		kind                  error
		remedy                string
	}{
		{name: "quota", status: 403, reason: "quotaExceeded", message: "Quota 'CPUS' exceeded", kind: cloud.ErrQuota, remedy: "request a higher quota"},
		{name: "capacity", status: 503, reason: "ZONE_RESOURCE_POOL_EXHAUSTED", kind: cloud.ErrCapacity, remedy: "use another zone"},
		{name: "capacity with details", status: 503, reason: "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", kind: cloud.ErrCapacity, remedy: "use another zone"},
		{name: "rate", status: 403, reason: "rateLimitExceeded", kind: cloud.ErrThrottled},
		{name: "rate as 429", status: 429, reason: "unheardOf", kind: cloud.ErrThrottled},
		{name: "permission", status: 403, reason: "forbidden", message: "Required 'compute.instanceGroupManagers.list' permission for 'projects/demo-project'", kind: cloud.ErrDenied, remedy: "grant the permission compute.instanceGroupManagers.list"},
		{name: "scope", status: 403, reason: "insufficientPermissions", kind: cloud.ErrDenied, remedy: "grant the permission that the message names"},
		{name: "API switched off", status: 403, reason: "accessNotConfigured", kind: cloud.ErrDenied, remedy: "gcloud services enable compute.googleapis.com"},
		{name: "billing", status: 403, reason: "billingNotEnabled", kind: cloud.ErrDenied, remedy: "billing account"},
		{name: "credentials", status: 401, reason: "authError", kind: cloud.ErrDenied, remedy: "workload identity federation"},
		{name: "conflict", status: 409, reason: "alreadyExists", kind: cloud.ErrConflict},
		{name: "condition", status: 412, reason: "conditionNotMet", kind: cloud.ErrConflict},
		{name: "in use", status: 400, reason: "resourceInUseByAnotherResource", kind: cloud.ErrConflict},
		{name: "not ready", status: 400, reason: "resourceNotReady", kind: cloud.ErrUnavailable},
		{name: "missing project", status: 404, reason: "notFound", kind: cloud.ErrNotFound},
		{name: "failure of Google", status: 503, reason: "backendError", kind: cloud.ErrUnavailable},
		{name: "unknown failure of Google", status: 500, reason: "unheardOf", kind: cloud.ErrUnavailable},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := start(t, gcptest.Options{})
			l.c.Refuse("compute.instanceGroupManagers.list", len(gcptest.Zones), gcptest.Refusal(tt.status, tt.reason, tt.message))
			_, err := l.p.Groups(t.Context())
			if !errors.Is(err, tt.kind) || !strings.Contains(err.Error(), tt.remedy) || !strings.Contains(err.Error(), tt.message) || !strings.Contains(err.Error(), tt.reason) {
				t.Errorf("error %v, want %v with remedy %q", err, tt.kind, tt.remedy)
			}
			if errors.Is(tt.kind, cloud.ErrThrottled) != !cloud.ThrottledUntil(err).IsZero() {
				t.Errorf("throttled until %v", cloud.ThrottledUntil(err))
			}
		})
	}
}

// TestThrottledRequestsAreNotSent checks that the provider is silent until the limit is refilled.
func TestThrottledRequestsAreNotSent(t *testing.T) {
	inBubble(t, slow, func(l *lab) {
		if _, err := l.p.Groups(l.Context()); err != nil {
			l.Fatal(err)
		}
		time.Sleep(time.Until(time.Now().Truncate(time.Minute).Add(90 * time.Second))) // half a minute past a full one
		refilled := time.Now().Add(30 * time.Second)
		l.c.Refuse("compute.instances.list", 1, gcptest.Refusal(http.StatusForbidden, "rateLimitExceeded", "Quota exceeded"))
		l.p.Instances(l.Context()) // one of three zones fails
		sent := l.c.Total()
		_, err := l.p.Instances(l.Context())
		if is := cloud.ThrottledUntil(err); !is.Equal(refilled) || l.c.Total() != sent {
			l.Errorf("throttled until %v, want %v; %d requests were sent", is, refilled, l.c.Total()-sent)
		}
		time.Sleep(30 * time.Second)
		if _, err := l.p.Instances(l.Context()); err != nil {
			l.Error(err)
		}
	})
}

// TestRequestsStayBelowTheRateLimits polls as fast as it can for three minutes.
func TestRequestsStayBelowTheRateLimits(t *testing.T) {
	inBubble(t, slow, func(l *lab) {
		begun, n := time.Now(), 0
		for ; time.Since(begun) < 3*time.Minute; n++ {
			if _, err := l.p.Instance(l.Context(), gcp.ProviderID(gcptest.Project, zone, "none")); !errors.Is(err, cloud.ErrNotFound) {
				l.Fatalf("after %d requests: %v", n, err)
			}
		}
		if most := int(api.Share*1500*3) + 150; n > most || n < most-300 {
			l.Errorf("%d requests in three minutes, want nearly %d", n, most)
		}
	})
}

func TestMissingPermissionIsNamed(t *testing.T) {
	for right, call := range map[string]func(l *lab) error{
		"compute.instanceGroupManagers.list": func(l *lab) error { _, err := l.p.Groups(l.Context()); return err },
		"compute.instanceTemplates.get":      func(l *lab) error { _, err := l.p.Groups(l.Context()); return err },
		"compute.instanceGroupManagers.get": func(l *lab) error {
			l.c.SetStockout(zone, true)
			l.create(l.group, token(1))
			_, err := l.p.Instances(l.Context())
			return err
		},
		"compute.instances.list": func(l *lab) error { _, err := l.p.Instances(l.Context()); return err },
		"compute.instances.get": func(l *lab) error {
			_, err := l.p.Instance(l.Context(), gcp.ProviderID(gcptest.Project, zone, "none"))
			return err
		},
		"compute.zoneOperations.list": func(l *lab) error {
			_, err := l.p.CreateInstances(l.Context(), l.group, []string{token(1)})
			return err
		},
		"compute.zoneOperations.get": func(l *lab) error {
			_, err := l.p.CreateInstances(l.Context(), l.group, []string{token(1)})
			return err
		},
		"compute.instanceGroupManagers.update": func(l *lab) error {
			_, err := l.p.CreateInstances(l.Context(), l.group, []string{token(1)})
			return err
		},
		"compute.instanceTemplates.create": func(l *lab) error { return l.p.SetGroupImage(l.Context(), l.group, l.next) },
		"compute.globalOperations.get":     func(l *lab) error { return l.p.SetGroupImage(l.Context(), l.group, l.next) },
		"compute.images.list":              func(l *lab) error { _, err := gcp.NewConsole(l.p).Images(l.Context()); return err },
	} {
		t.Run(right, func(t *testing.T) {
			inBubble(t, slow, func(l *lab) {
				l.c.Revoke(right)
				err := call(l)
				if e, ok := errors.AsType[*api.Error](err); !ok || e.Permission != right || !errors.Is(err, cloud.ErrDenied) || !strings.Contains(e.Remedy, right) {
					l.Fatalf("error %v, want one that names %s", err, right)
				}
				l.c.Grant(right)
				if err := call(l); errors.Is(err, cloud.ErrDenied) {
					l.Errorf("after the permission was granted: %v", err)
				}
			})
		})
	}
}

func TestStockoutIsReportedAndEnds(t *testing.T) {
	inBubble(t, slow, func(l *lab) {
		l.c.SetStockout(zone, true)
		made := l.create(l.group, token(1))[0]
		time.Sleep(time.Minute)
		all, err := l.p.Instances(l.Context())
		if err != nil || len(all) != 1 || all[0].State != cloud.Creating || all[0].Token != token(1) || !strings.Contains(all[0].Message, zone) || !strings.Contains(all[0].Message, "use another zone") {
			l.Fatalf("instances %+v, %v", all, err)
		}
		if other := l.create(gcp.GroupID(gcptest.Project, gcptest.Zones[1], "workers"), token(2))[0]; other.Name == made.Name {
			l.Errorf("another zone made %+v", other)
		}
		l.c.SetStockout(zone, false)
		time.Sleep(2 * time.Minute)
		if i := l.read(made.ProviderID); i.State != cloud.Ready || i.Incarnation == "" || i.Image != l.old || !i.IP.IsValid() {
			l.Errorf("after the stockout: %+v", i)
		}
	})
}

// TestStockoutIsGivenUp deletes a machine that its group could not create yet.
func TestStockoutIsGivenUp(t *testing.T) {
	inBubble(t, slow, func(l *lab) {
		l.c.SetStockout(zone, true)
		made := l.create(l.group, token(1))[0]
		time.Sleep(time.Minute)
		l.delete(made.Key())
		l.c.SetStockout(zone, false)
		time.Sleep(time.Hour)
		l.gone(made.Key())
		if again := l.create(l.group, token(1))[0]; again.State != cloud.Terminated {
			l.Errorf("the token of a machine that was given up returned %+v", again)
		}
	})
}

func TestQuotaIsReported(t *testing.T) {
	inBubble(t, slow, func(l *lab) {
		l.c.SetQuota(1)
		l.create(l.group, token(1), token(2))
		time.Sleep(time.Minute)
		all, err := l.p.Instances(l.Context())
		if err != nil || len(all) != 2 || !strings.Contains(all[1].Message, "request a higher quota") {
			l.Errorf("instances %+v, %v", all, err)
		}
	})
}

// TestTokenIsRememberedAcrossRestarts repeats the token of a deleted machine in a process that never saw it.
func TestTokenIsRememberedAcrossRestarts(t *testing.T) {
	for name, age := range map[string]time.Duration{"a new machine": time.Minute, "a machine whose insertion is not read any more": 12 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, slow, func(l *lab) {
				made := l.create(l.group, token(1))[0]
				time.Sleep(age)
				made = l.read(made.Key())
				l.delete(made.Key())
				time.Sleep(cloud.TokenMemory)
				l.p = l.provider()
				l.gone(made.Key())
				if again := l.create(l.group, token(1))[0]; again.State != cloud.Terminated || again.Key() != made.Key() {
					l.Errorf("the token returned %+v, want %s Terminated", again, made.Key())
				}
				if again := l.create(l.group, token(1), token(2)); again[0].State != cloud.Terminated || again[1].State != cloud.Creating {
					l.Errorf("the token and a new one returned %+v", again)
				}
			})
		})
	}
}

// TestUnfinishedInsertOperation reads an operation that can still fail. Its number is not that of the machine then.
func TestUnfinishedInsertOperation(t *testing.T) {
	inBubble(t, slow, func(l *lab) {
		list := func(time string) {
			l.c.Refuse("compute.zoneOperations.list", 1, wire.Reply{Status: http.StatusOK, Body: fmt.Appendf(nil,
				`{"items":[{"name":"o","operationType":"insert","status":"RUNNING","targetId":"7","targetLink":"zones/%s/instances/workers-%s","insertTime":%q}]}`, zone, token(1), time)})
		}
		list("yesterday")
		if _, err := l.p.CreateInstances(l.Context(), l.group, []string{token(1)}); err == nil || !strings.Contains(err.Error(), "time of operation o") {
			l.Errorf("error %v for an operation without a time", err)
		}
		list(time.Now().Format(time.RFC3339))
		if made := l.create(l.group, token(1))[0]; made.State != cloud.Creating {
			l.Errorf("made %+v", made)
		}
		time.Sleep(time.Minute)
		if again := l.create(l.group, token(1))[0]; again.State != cloud.Ready || again.Incarnation == "7" {
			l.Errorf("the token returned %+v", again)
		}
	})
}

// TestTemplateOfAnotherGroupIsNotUsed sets the image of a group that was made again, with other properties.
func TestTemplateOfAnotherGroupIsNotUsed(t *testing.T) {
	inBubble(t, slow, func(l *lab) {
		for _, role := range []cloud.Role{cloud.Worker, cloud.ControlPlane} {
			l.c.AddGroup(zone, "again", role, l.old, gcptest.UID, nil)
			p := l.provider()
			if err := p.SetGroupImage(l.Context(), gcp.GroupID(gcptest.Project, zone, "again"), l.next); err != nil {
				l.Fatal(err)
			}
			groups, err := l.provider().Groups(l.Context())
			n := slices.IndexFunc(groups, func(g cloud.Group) bool { return g.Name == "again" })
			if err != nil || n < 0 || groups[n].Role != role || groups[n].Image != l.next {
				l.Errorf("groups %+v, %v, want one of role %s with image %s", groups, err, role, l.next)
			}
		}
	})
}

// TestNameIsReused has a group recreate a machine under its name. The old key does not reach it.
func TestNameIsReused(t *testing.T) {
	inBubble(t, slow, func(l *lab) {
		made := l.create(l.group, token(1))[0]
		time.Sleep(time.Minute)
		old := l.read(made.Key())
		l.c.Kill(old.Name)
		time.Sleep(2 * time.Minute)
		reborn := l.read(old.ProviderID)
		if reborn.Name != old.Name || reborn.Key() == old.Key() || reborn.State == cloud.Terminating {
			l.Fatalf("the machine is %+v, it was %+v", reborn, old)
		}
		l.gone(old.Key())
		if l2, err := l.p.Describe(l.Context(), []string{old.Key()}); err != nil || len(l2) > 0 {
			l.Errorf("description of the old key: %+v, %v", l2, err)
		}
		l.delete(old.Key())
		time.Sleep(2 * time.Minute)
		if i := l.read(reborn.Key()); i.State != cloud.Ready {
			l.Errorf("the deletion of the old machine reached %+v", i)
		}
		if again := l.create(l.group, token(1))[0]; again.State != cloud.Terminated || again.Key() != old.Key() {
			l.Errorf("the token of the old machine returned %+v", again)
		}
	})
}

func TestAutohealingIsRefused(t *testing.T) {
	inBubble(t, slow, func(l *lab) {
		id := l.c.AddGroup(zone, "healed", cloud.Worker, l.old, gcptest.UID, func(g *compute.InstanceGroupManager) {
			g.AutoHealingPolicies = []*compute.InstanceGroupManagerAutoHealingPolicy{{InitialDelaySec: 300}}
		})
		_, err := l.p.CreateInstances(l.Context(), id, []string{token(1)})
		if !errors.Is(err, cloud.ErrConflict) || !strings.Contains(err.Error(), "--clear-autohealing") {
			l.Errorf("error %v", err)
		}
		long := l.c.AddGroup(zone, strings.Repeat("w", 39), cloud.Worker, l.old, gcptest.UID, nil)
		if _, err := l.provider().CreateInstances(l.Context(), long, []string{token(1)}); err == nil || !strings.Contains(err.Error(), "39 characters") {
			l.Errorf("error %v", err)
		}
	})
}

// TestFailedCreationIsRepeated gets another request ID after its operation has failed.
func TestFailedCreationIsRepeated(t *testing.T) {
	o := slow
	o.LateConflicts = true
	inBubble(t, o, func(l *lab) {
		first := l.create(l.group, token(1))[0]
		l.p = l.provider() // does not know the name, and no machine was inserted yet
		made := l.create(l.group, token(1), token(2))
		if made[0].Name != first.Name || made[1].State != cloud.Creating {
			l.Fatalf("made %+v", made)
		}
		time.Sleep(time.Minute)
		if all, err := l.p.Instances(l.Context()); err != nil || len(all) != 2 {
			l.Errorf("instances %+v, %v", all, err)
		}
	})
}

func TestOperationThatNeverEnds(t *testing.T) {
	inBubble(t, slow, func(l *lab) {
		l.c.StickNext("compute.instanceGroupManagers.createInstances")
		begun := time.Now()
		_, err := l.p.CreateInstances(l.Context(), l.group, []string{token(1)})
		if !errors.Is(err, cloud.ErrUnavailable) || !strings.Contains(err.Error(), "has not ended") || time.Since(begun) > 2*time.Minute {
			l.Errorf("after %v: %v", time.Since(begun), err)
		}
		// Another request makes the machine. A repeated one with the same ID would wait for the lost operation.
		begun = time.Now()
		l.create(l.group, token(1))
		if took := time.Since(begun); took > time.Minute {
			l.Errorf("the second request took %v", took)
		}
		l.c.StickNext("compute.instanceGroupManagers.createInstances")
		ctx, cancel := context.WithTimeout(l.Context(), time.Second)
		defer cancel()
		if _, err := l.p.CreateInstances(ctx, l.group, []string{token(2)}); !errors.Is(err, context.DeadlineExceeded) {
			l.Errorf("with a deadline: %v", err)
		}
	})
}

func TestZoneThatFailsLeavesAPartialList(t *testing.T) {
	l := start(t, gcptest.Options{})
	l.c.Refuse("compute.instanceGroupManagers.list", 1, gcptest.Refusal(http.StatusServiceUnavailable, "backendError", "try again"))
	groups, err := l.p.Groups(t.Context())
	if !errors.Is(err, cloud.ErrPartial) || len(groups) < 2 {
		t.Errorf("groups %+v, %v", groups, err)
	}
}

// TestImageOfAGroup checks that only new machines get another image, and that templates are made once.
func TestImageOfAGroup(t *testing.T) {
	inBubble(t, slow, func(l *lab) {
		before := l.create(l.group, token(1))[0]
		time.Sleep(time.Minute)
		for _, image := range []string{l.next, l.old, l.next} {
			if err := l.p.SetGroupImage(l.Context(), l.group, image); err != nil {
				l.Fatal(err)
			}
		}
		if n := l.c.Calls()["compute.instanceTemplates.insert"]; n != 3 {
			l.Errorf("%d requests for templates, want 3", n)
		}
		after := l.create(l.group, token(2))[0]
		time.Sleep(time.Minute)
		if a, b := l.read(before.Key()), l.read(after.Key()); a.Image != l.old || b.Image != l.next {
			l.Errorf("images %s and %s", a.Image, b.Image)
		}
		groups, err := l.provider().Groups(l.Context())
		if n := slices.IndexFunc(groups, func(g cloud.Group) bool { return g.ID == l.group }); err != nil || n < 0 || groups[n].Image != l.next || groups[n].Count != 2 {
			l.Errorf("groups %+v, %v", groups, err)
		}
	})
}

func TestConsole(t *testing.T) {
	inBubble(t, slow, func(l *lab) {
		c := gcp.NewConsole(l.p)
		l.create(l.group, token(1))
		time.Sleep(time.Minute)
		info, err := c.Describe(l.Context())
		if err != nil || info.UID != gcptest.UID {
			l.Errorf("info %+v, %v", info, err)
		}
		machines, err := c.Machines(l.Context())
		if err != nil || len(machines) != 1 || machines[0].GroupName != "workers" || machines[0].Stage != "" {
			l.Errorf("machines %+v, %v", machines, err)
		}
		images, err := c.Images(l.Context())
		if err != nil || len(images) != 2 || images[1].Reference != l.next || images[1].Version != "v1.1.0" {
			l.Errorf("images %+v, %v", images, err)
		}
		groups, err := c.Groups(l.Context())
		if err != nil || len(groups) != 4 { // not that of another cluster
			l.Errorf("groups %+v, %v", groups, err)
		}
		if _, err := c.Components(l.Context(), version.MustParse("v1.35.4")); !errors.Is(err, cloud.ErrNotFound) {
			l.Errorf("components: %v", err)
		}
	})
}

// Machines that join together are read together: each joins by a call of its own.
func TestConcurrentCallsShareRequests(t *testing.T) {
	inBubble(t, slow, func(l *lab) {
		keys := l.c.Seed(gcp.GroupID(gcptest.Project, gcptest.Zones[0], "workers"), 50)
		before := l.c.Calls()["compute.instances.list"]
		var all sync.WaitGroup
		for _, key := range keys {
			all.Go(func() {
				if found, err := l.p.Describe(l.Context(), []string{key}); err != nil || len(found) != 1 || found[0].Key() != key {
					l.Errorf("%s: %v, %v", key, found, err)
				}
			})
		}
		all.Wait()
		if n := l.c.Calls()["compute.instances.list"] - before; n != 1 {
			l.Errorf("%d calls cost %d requests, want 1", len(keys), n)
		}
		ctx, cancel := context.WithCancel(l.Context())
		cancel()
		time.Sleep(time.Minute) // the descriptions are old
		if _, err := l.p.Describe(ctx, keys); !errors.Is(err, context.Canceled) {
			l.Errorf("a canceled call: %v", err)
		}
		if found, err := l.p.Describe(l.Context(), keys); err != nil || len(found) != len(keys) {
			l.Errorf("after a canceled call: %d machines, %v", len(found), err)
		}
	})
}

// TestCallsOfARollout replaces machines of three zones as an operator does, and counts the requests.
func TestCallsOfARollout(t *testing.T) {
	for _, tt := range []struct {
		name        string
		each, surge int
		most        float64 // calls for each machine
	}{
		{name: "small surge", each: 34, surge: 17, most: 2.5},
		{name: "large surge", each: 170, surge: 85, most: 0.5},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, slow, func(l *lab) { l.rollout(tt.each, tt.surge, tt.most) })
		})
	}
}

// rollout replaces each machines of every zone.
func (l *lab) rollout(each, surge int, most float64) {
	old := map[string][]string{}
	for _, z := range gcptest.Zones {
		id := gcp.GroupID(gcptest.Project, z, "workers")
		old[id] = l.c.Seed(id, each)
	}
	begun, listed, n := time.Now(), time.Time{}, 0
	// poll describes machines every six seconds, and lists all every 20 s, as the operator does in a rollout.
	poll := func(keys []string, until func([]cloud.Instance) bool) {
		for {
			found, err := l.p.Describe(l.Context(), keys)
			if err != nil {
				l.Fatal(err)
			}
			if until(found) {
				return
			}
			if now := time.Now(); now.Sub(listed) >= 20*time.Second {
				listed = now
				_, err := l.p.Instances(l.Context())
				if _, groupsErr := l.p.Groups(l.Context()); errors.Join(err, groupsErr) != nil {
					l.Fatal(err, groupsErr)
				}
			}
			time.Sleep(6 * time.Second)
		}
	}
	for _, z := range gcptest.Zones {
		id := gcp.GroupID(gcptest.Project, z, "workers")
		if err := l.p.SetGroupImage(l.Context(), id, l.next); err != nil {
			l.Fatal(err)
		}
		for leave := range slices.Chunk(old[id], surge) {
			var tokens, keys []string
			for range leave {
				n++
				tokens = append(tokens, token(n))
			}
			for _, i := range l.create(id, tokens...) {
				keys = append(keys, i.Key())
			}
			poll(keys, func(found []cloud.Instance) bool {
				ready := 0
				for _, i := range found {
					if i.State == cloud.Ready && i.Image == l.next {
						ready++
					}
				}
				return ready == len(keys)
			})
			l.delete(leave...)
			poll(leave, func(found []cloud.Instance) bool { return len(found) == 0 })
		}
	}
	calls := float64(l.c.Total()) / float64(n)
	l.Logf("%d machines replaced in %v, %d at a time, %.2f calls for each: %v", n, time.Since(begun), surge, calls, l.c.Calls())
	if calls > most {
		l.Errorf("%.2f calls for each machine, want %.2f", calls, most)
	}
	all, err := l.p.Instances(l.Context())
	if err != nil || len(all) != 3*each {
		l.Errorf("%d machines, %v", len(all), err)
	}
}
