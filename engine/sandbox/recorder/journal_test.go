package recorder

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

// TestEntryFormat keeps the lines of journals that exist: one key per fact beside the time.
func TestEntryFormat(t *testing.T) {
	now := time.Date(2026, 11, 22, 8, 0, 0, 0, time.UTC)
	var lines []string
	var want []Entry
	for _, tt := range []struct {
		fact Fact
		line string
	}{
		{fact: Begin, line: `"mark":"begin"`},
		{fact: End, line: `"mark":"end"`},
		{fact: Note("a machine is cut off"), line: `"note":"a machine is cut off"`},
		{fact: &Stream{Kind: "nodes", Cut: true}, line: `"stream":{"kind":"nodes","cut":true}`},
		{fact: &Node{Name: "w", Ready: true}, line: `"node":{"name":"w","ready":true}`},
		{fact: &Pending{Name: "p", Goal: "Join"}, line: `"pending":{"name":"p","goal":"Join"}`},
		{fact: &Joining{Name: "j", Gone: true}, line: `"joining":{"name":"j","gone":true}`},
		{fact: &Target{Image: "i", Components: "c", Kubernetes: "v1.36.3"}, line: `"target":{"image":"i","components":"c","kubernetes":"v1.36.3"}`},
		{fact: &Strategy{Paused: true}, line: `"strategy":{"paused":true}`},
		{fact: &Scaler{Replicas: 1}, line: `"scaler":{"replicas":1}`},
		{fact: &Lease{}, line: `"lease":{}`},
		{fact: &Server{Node: "c", Version: "v1.36.3"}, line: `"server":{"node":"c","version":"v1.36.3"}`},
		{fact: &Machines{List: []Machine{{ID: "1", Name: "w", Group: "g", State: "Ready"}}}, line: `"machines":{"list":[{"id":"1","name":"w","group":"g","state":"Ready"}]}`},
		{fact: &Members{List: []Member{{Name: "c", Learner: true}}}, line: `"members":{"list":[{"name":"c","learner":true}]}`},
		{fact: &Probe{From: "w", TookMS: 3}, line: `"probe":{"from":"w","tookMS":3}`},
		{fact: &Outage{Machines: []string{"c", "w"}, Away: []string{"w"}, TookMS: 300000}, line: `"outage":{"machines":["c","w"],"away":["w"],"tookMS":300000}`},
		{fact: &Secret{Name: "s", On: []SecretOn{{Node: "c", Sum: "00", Stored: "k8s:enc:kms:v2:k"}}}, line: `"secret":{"name":"s","on":[{"node":"c","sum":"00","stored":"k8s:enc:kms:v2:k"}]}`},
	} {
		e := Entry{Time: now, Fact: tt.fact}
		b, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		line := `{"time":"2026-11-22T08:00:00Z",` + tt.line + `}`
		if string(b) != line {
			t.Errorf("%T is written as %s, want %s", tt.fact, b, line)
		}
		lines, want = append(lines, line), append(want, e)
	}
	file := filepath.Join(t.TempDir(), "journal.jsonl")
	if err := os.WriteFile(file, []byte(strings.Join(lines, "\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := Read(file); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("read %v, %v; want %v", got, err, want)
	}
}
