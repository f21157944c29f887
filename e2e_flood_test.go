package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"constellation/engine/atls/flood"
	"constellation/engine/plan"
	"constellation/internal/testneeds"
)

func TestMain(m *testing.M) {
	flood.Child()
	// Tests that wait for other tests' clusters (newReal, newSimulated) count as running.
	flag.Parse()
	if err := flag.Set("test.parallel", "64"); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// TestFloodOfRealMachines creates a cluster while root on a worker floods the control plane:
// the bootstrapper from 200 addresses, the join service from one. The console and the other
// workers must still be served.
func TestFloodOfRealMachines(t *testing.T) {
	testneeds.OptIn(t, "CONSTELLATION_E2E_ROLLOUT", "five minutes")
	const limit = 10 * time.Second
	c := newCloud(t, 1, 3)
	machines, _ := c.reach(slog.New(slog.DiscardHandler))
	all, err := machines.Instances(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	addresses := map[string]netip.Addr{}
	for _, i := range all {
		addresses[i.Name] = i.IP
	}
	target, captured := addresses["control-plane-0"], addresses["worker-2"]
	if !target.IsValid() || !captured.IsValid() {
		t.Fatalf("the cloud has addresses %v", addresses)
	}

	// The captured worker gets this test binary, which sends the flood, and the addresses.
	program, err := os.Open(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	c.shell(time.Minute, "worker-2", program, "cat > /root/flood && chmod 700 /root/flood")
	b := captured.As4()
	var sources []netip.Addr
	add := ""
	for i := byte(50); i < 250; i++ {
		a := netip.AddrFrom4([4]byte{b[0], b[1], b[2], i})
		sources = append(sources, a)
		add += fmt.Sprintf("ip addr add %s/24 dev $dev\n", a)
	}
	c.shell(time.Minute, "worker-2", strings.NewReader(add), fmt.Sprintf("export dev=$(ip -o -4 addr | awk '$4 ~ /^%s\\// {print $2}'); bash -e -s", captured))

	stopInit := c.floods("worker-2", flood.Flood{Address: netip.AddrPortFrom(target, 9000).String(), Sources: sources, Silent: 10_000, Half: 1_000}, true)
	stopJoin := c.floods("worker-2", flood.Flood{Address: netip.AddrPortFrom(target, 30090).String(), Sources: []netip.Addr{captured}, Silent: 10_000, Half: 1_000}, false)
	r := c.run(12*time.Minute, "init", "--non-interactive", "--yes", "-o", "json").want(plan.ExitDone)
	t.Logf("flood of the bootstrapper: %s", stopInit())
	t.Logf("flood of the join service: %s", stopJoin())

	var began, attested time.Time
	for _, e := range r.events() {
		switch {
		case began.IsZero() && e.Kind == plan.KindStep && e.Step == "init-first-node":
			began = e.Time
		case attested.IsZero() && e.Kind == plan.KindNode && e.Node == "control-plane-0" && e.Text == "attested":
			attested = e.Time
		}
	}
	if took := attested.Sub(began); began.IsZero() || attested.IsZero() || took > limit {
		t.Errorf("the console reached the first machine after %s (from %s to %s), want at most %s", took, began, attested, limit)
	} else {
		t.Logf("the console reached the first machine after %s", took.Round(time.Millisecond))
	}
	for _, name := range []string{"worker-0", "worker-1"} {
		journal := c.run(time.Minute, "sandbox", "shell", name, "--", "journalctl", "-u", "constellation-bootstrapper", "-o", "cat", "--no-pager").want(plan.ExitDone).stdout
		line := ""
		for l := range strings.Lines(journal) {
			if strings.Contains(l, "join ticket received") {
				line = l
			}
		}
		var entry struct{ Took time.Duration }
		if err := json.Unmarshal([]byte(line), &entry); err != nil {
			t.Errorf("%s has no ticket: %v\n%s", name, err, tail(journal))
			continue
		}
		if entry.Took <= 0 || entry.Took > limit {
			t.Errorf("%s got its ticket after %s, want at most %s", name, entry.Took, limit)
		}
		t.Logf("%s got its ticket after %s", name, entry.Took)
	}
	c.wantNodes("control-plane-0", "worker-0", "worker-1", "worker-2")
}

// floods runs f in a machine. If requested it waits until all connections were open once.
// stop ends the flood and returns its report.
func (c *cloud) floods(machine string, f flood.Flood, open bool) (stop func() string) {
	t := c.t
	t.Helper()
	env, err := f.Environment()
	if err != nil {
		t.Fatal(err)
	}
	cmd := c.command(t.Context(), "sandbox", "shell", machine, "--", "bash", "-c", "exec env '"+env+"' /root/flood")
	cmd.Stderr = t.Output()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if open {
		if _, err := fmt.Fscanln(out, new(string)); err != nil {
			t.Fatalf("the flood in %s did not begin: %v", machine, err)
		}
	}
	return func() string {
		in.Close()
		told, err := io.ReadAll(out)
		if werr := cmd.Wait(); err != nil || werr != nil {
			if ended := new(exec.ExitError); !errors.As(werr, &ended) {
				t.Errorf("the flood in %s ended with %v, %v", machine, err, werr)
			}
		}
		return strings.Join(strings.Fields(string(told)), " ")
	}
}
