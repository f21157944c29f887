package machines

import (
	"strings"
	"testing"
)

func TestLabelsAndTaintsOfTheList(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, labels, taints string
		want                 string // part of the error; empty: valid
	}{
		{name: "nothing"},
		{name: "several", labels: "disk=ssd,example.com/rack=r-1,empty=", taints: "batch=yes:NoSchedule,batch=no:NoExecute,gpu:PreferNoSchedule"},
		{name: "a label that no kubelet can write", labels: "node-restriction.kubernetes.io/tier=gold", taints: "node-restriction.kubernetes.io/tier=gold:NoSchedule"},
		{name: "a role", labels: "node-role.kubernetes.io/control-plane=", want: "reserved: keys of kubernetes.io"},
		{name: "a key of Kubernetes", labels: "kubernetes.io/hostname=x", want: "reserved"},
		{name: "a key below that prefix", labels: "x.node-restriction.kubernetes.io/tier=gold", want: "reserved"},
		{name: "a key of k8s.io", labels: "a.k8s.io/x=y", want: "reserved"},
		{name: "a key of ours", labels: "constellation.edgeless.systems/in-place=true", want: "reserved: keys of edgeless.systems"},
		{name: "a key of Plans", labels: "plan.upgrade.cattle.io/os=x", want: "reserved"},
		{name: "a taint of Kubernetes", taints: "node.kubernetes.io/unschedulable:NoSchedule", want: "reserved"},
		{name: "no value", labels: "disk", want: "want key=value"},
		{name: "a label twice", labels: "a=1,a=2", want: "twice"},
		{name: "a key with a blank", labels: "a b=1", want: "is no key"},
		{name: "a domain in capitals", labels: "Example.com/a=1", want: "is no key"},
		{name: "a long value", labels: "a=" + strings.Repeat("x", 64), want: "at most 63"},
		{name: "no effect", taints: "a=b", want: "is no taint"},
		{name: "an unknown effect", taints: "a=b:Never", want: "is no taint"},
		{name: "a taint twice", taints: "a=b:NoSchedule,a=c:NoSchedule", want: "twice"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			labels, err := ParseLabels(tt.labels)
			taints, e2 := ParseTaints(tt.taints)
			if err == nil {
				err = e2
			}
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Fatalf("got %v, want %q", err, tt.want)
			}
			if err != nil {
				return
			}
			again, err := ParseLabels(LabelsText(labels))
			if err != nil || len(again) != len(labels) {
				t.Errorf("labels written and read: %v, %v", again, err)
			}
			if x, err := ParseTaints(TaintsText(taints)); err != nil || TaintsText(x) != TaintsText(taints) {
				t.Errorf("taints written and read: %v, %v", x, err)
			}
		})
	}
}
