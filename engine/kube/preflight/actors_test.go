package preflight

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// A node on which a Plan failed stays in the list of nodes, although the Plan is not being
// applied there. Progress of nodes is reported if the controller reports it.
func TestPlansThatFailOrAreApplied(t *testing.T) {
	var all []actor
	if err := json.Unmarshal([]byte(`[
		{"metadata": {"namespace": "s", "name": "fails"}, "status": {"applying": ["n1"], "conditions": [{"type": "Complete", "status": "False", "reason": "JobFailed", "message": "no space left"}],
			"constellation": {"nodes": [{"name": "n1", "message": "no space left"}]}}},
		{"metadata": {"namespace": "s", "name": "both"}, "status": {"applying": ["n1", "n2"], "conditions": [{"type": "Complete", "status": "False", "reason": "JobFailed", "message": "no space left"}],
			"constellation": {"nodes": [{"name": "n1", "message": "no space left"}, {"name": "n2", "message": "pod a/b may not be evicted"}]}}},
		{"metadata": {"namespace": "s", "name": "many"}, "status": {"applying": ["n1", "n2", "n3", "n4"], "constellation": {"nodes": [
			{"name": "n1", "message": "a"}, {"name": "n2", "message": "b"}, {"name": "n3", "message": "c"}, {"name": "n4", "message": "d"}]}}},
		{"metadata": {"namespace": "s", "name": "takes-turns"}, "spec": {"constellation": {"alone": true}}, "status": {"applying": ["n1"], "constellation": {"nodes": [{"name": "n1", "message": "a"}]}}},
		{"metadata": {"namespace": "s", "name": "alone-by-another-controller"}, "spec": {"constellation": {"alone": true}}, "status": {"applying": ["n1"]}},
		{"metadata": {"namespace": "s", "name": "theirs"}, "status": {"applying": ["n1"]}},
		{"metadata": {"namespace": "s", "name": "done"}, "status": {"conditions": [{"type": "Complete", "status": "True"}]}}
	]`), &all); err != nil {
		t.Fatal(err)
	}
	var got [][2]string
	for _, f := range nodeActors(&world{actors: map[schema.GroupResource][]actor{plans: all}}, nil) {
		got = append(got, [2]string{f.Title, f.Detail})
	}
	want := [][2]string{
		{"Plan s/fails has failed: no space left", ""},
		{"Plan s/both has failed: no space left", "n1: no space left; n2: pod a/b may not be evicted"},
		{"Plan s/many is being applied to n1, n2, n3 and 1 more", "n1: a; n2: b; n3: c; 1 more"},
		{"Plan s/alone-by-another-controller is being applied to n1", ""},
		{"Plan s/theirs is being applied to n1", ""},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}
