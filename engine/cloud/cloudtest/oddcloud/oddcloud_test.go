package oddcloud_test

import (
	"errors"
	"os/exec"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"constellation/engine/cloud"
	"constellation/engine/cloud/cloudtest"
	"constellation/engine/cloud/cloudtest/oddcloud"
	"constellation/engine/cloud/providers"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/sandbox/hollow"
	"constellation/internal/testneeds"
)

var _ providers.Control = (*oddcloud.Cloud)(nil)

// start starts the cloud without a cluster: its machines boot, and never join.
func start(t *testing.T, o oddcloud.Options) *oddcloud.Cloud {
	t.Helper()
	o.Hollow.Cluster = &rest.Config{Host: "https://127.0.0.1:1"}
	o.Hollow.Times = hollow.Times{Boot: 20 * time.Millisecond, Off: 20 * time.Millisecond}
	c, wait, err := oddcloud.Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(wait)
	return c
}

func TestOddCloudConforms(t *testing.T) {
	c := start(t, oddcloud.Options{Lag: 2 * time.Second, Throttle: 30 * time.Millisecond})
	cloudtest.Run(t, cloudtest.Options{Cloud: c, Group: oddcloud.Group(sandboxapi.WorkerGroup), Unknown: oddcloud.ID("worker-999")})
}

func TestOddCloudWithImagesConforms(t *testing.T) {
	c := start(t, oddcloud.Options{Images: catalogue()})
	cloudtest.Run(t, cloudtest.Options{
		Cloud: c, Group: oddcloud.Group(sandboxapi.WorkerGroup), Unknown: oddcloud.ID("worker-999"), Images: []string{"ami-1", "ami-2"},
	})
}

// Its lists lag five minutes, by a clock on which ten minutes pass in a second.
func TestOddCloudWithListsOfMinutesAgoConforms(t *testing.T) {
	begin := time.Now()
	fast := func() time.Time { return begin.Add(600 * time.Since(begin)) }
	c := start(t, oddcloud.Options{Lag: 5 * time.Minute, Throttle: 20 * time.Second, Now: fast})
	cloudtest.Run(t, cloudtest.Options{Cloud: c, Group: oddcloud.Group(sandboxapi.WorkerGroup), Unknown: oddcloud.ID("worker-999")})
}

func TestNamesAndIDsAreReused(t *testing.T) {
	c, ctx := start(t, oddcloud.Options{}), t.Context()
	create := func(token string) cloud.Instance {
		t.Helper()
		l, err := c.CreateInstances(ctx, oddcloud.Group(sandboxapi.WorkerGroup), []string{token})
		if err != nil || len(l) != 1 {
			t.Fatalf("create: %+v, %v", l, err)
		}
		return l[0]
	}
	old := create("1")
	if err := c.DeleteInstances(ctx, []string{old.Key()}); err != nil {
		t.Fatal(err)
	}
	for _, err := c.Instance(ctx, old.Key()); !errors.Is(err, cloud.ErrNotFound); _, err = c.Instance(ctx, old.Key()) {
		if ctx.Err() != nil {
			t.Fatal(ctx.Err())
		}
	}
	heir := create("2")
	if heir.Name != old.Name || heir.ProviderID != old.ProviderID || heir.Key() == old.Key() {
		t.Fatalf("the new machine is %+v, the old one was %+v", heir, old)
	}
	// A late request about the old machine does not reach the new one.
	if err := c.DeleteInstances(ctx, []string{old.Key()}); err != nil {
		t.Fatal(err)
	}
	if i, err := c.Instance(ctx, heir.ProviderID); err != nil || i.Key() != heir.Key() || i.State == cloud.Terminating {
		t.Errorf("after the deletion of the old machine: %+v, %v", i, err)
	}
	if again := create("1"); again.State != cloud.Terminated || again.Key() != old.Key() {
		t.Errorf("the token of the old machine returned %+v", again)
	}
}

func TestNoProgramContainsTheOddCloud(t *testing.T) {
	testneeds.Tree()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "constellation", "constellation/operator/cmd", "constellation/joinservice/cmd", "constellation/engine/sandbox/cmd").CombinedOutput()
	if err != nil {
		t.Fatalf("list imports: %v\n%s", err, out)
	}
	if strings.Contains(string(out), "constellation/engine/cloud/cloudtest/oddcloud") {
		t.Error("a program imports the odd cloud")
	}
}
