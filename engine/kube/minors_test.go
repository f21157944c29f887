package kube

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiversion "k8s.io/apimachinery/pkg/version"

	"constellation/engine/check"
	"constellation/engine/cluster"
	"constellation/engine/plan"
	"constellation/internal/golden"
	"constellation/internal/testneeds"
)

//go:embed testdata/apis.txt
var recordedAPIs string

// recordedAPI is a line of testdata/apis.txt.
type recordedAPI struct {
	group, version, resource, kind string
	minors                         [][2]int
}

// lastRecorded is the newest minor of testdata/apis.txt.
const lastRecorded = 37

func (a *recordedAPI) servedBy(minor int) bool {
	return slices.ContainsFunc(a.minors, func(r [2]int) bool { return r[0] <= minor && minor <= r[1] })
}

// path is that of all its objects.
func (a *recordedAPI) path() string {
	if a.group == "" {
		return "/api/" + a.version + "/" + a.resource
	}
	return "/apis/" + a.group + "/" + a.version + "/" + a.resource
}

func readAPIs(t *testing.T) (out []recordedAPI) {
	t.Helper()
	lines := bufio.NewScanner(strings.NewReader(recordedAPIs))
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if strings.HasPrefix(lines.Text(), "#") {
			continue
		}
		if len(f) != 4 {
			t.Fatalf("line %q has %d fields, want 4", lines.Text(), len(f))
		}
		a := recordedAPI{resource: f[1], kind: f[2]}
		a.group, a.version = path.Dir(f[0]), path.Base(f[0])
		if a.group == "." {
			a.group = ""
		}
		for r := range strings.SplitSeq(f[3], ",") {
			var between [2]int
			if _, err := fmt.Sscanf(r, "%d-%d", &between[0], &between[1]); err != nil {
				t.Fatalf("line %q: %v", lines.Text(), err)
			}
			a.minors = append(a.minors, between)
		}
		out = append(out, a)
	}
	return out
}

// recordedServer stands for an API server of a minor that cannot run here. It serves the APIs that
// servers of this minor serve, with objects by path and otherwise empty lists. Newer minors than
// the recorded ones serve the APIs of the last recorded one.
type recordedServer struct {
	minor   int
	apis    []recordedAPI
	lists   map[string]func(i int) any // objects of a list, by path
	counts  map[string]int             // how many there are
	size    int64                      // of etcd's database
	mu      sync.Mutex
	changed []string // requests that are no reads
}

func newRecordedServer(t *testing.T, minor int) *recordedServer {
	t.Helper()
	s := &recordedServer{minor: minor, lists: map[string]func(int) any{}, counts: map[string]int{}, size: 1 << 20}
	for _, a := range readAPIs(t) {
		if a.servedBy(min(minor, lastRecorded)) {
			s.apis = append(s.apis, a)
		}
	}
	s.add("/api/v1/nodes", 3, func(i int) any {
		return corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("node-%d", i), Annotations: map[string]string{"kubeadm.alpha.kubernetes.io/cri-socket": "x"}},
			Status: corev1.NodeStatus{
				NodeInfo:   corev1.NodeSystemInfo{KubeletVersion: s.gitVersion(), ContainerRuntimeVersion: "containerd://2.1.0"},
				Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
			},
		}
	})
	s.add("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases", 3, func(i int) any {
		return coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("node-%d", i), Namespace: "kube-node-lease"},
			Spec:       coordinationv1.LeaseSpec{RenewTime: new(metav1.NowMicro())},
		}
	})
	return s
}

func (s *recordedServer) gitVersion() string { return fmt.Sprintf("v1.%d.0", s.minor) }

func (s *recordedServer) add(at string, count int, object func(i int) any) {
	s.lists[at], s.counts[at] = object, count
}

// leaving are the APIs that the next minor does not serve.
func (s *recordedServer) leaving() (out []recordedAPI) {
	for _, a := range s.apis {
		if s.minor < lastRecorded && !a.servedBy(s.minor+1) {
			out = append(out, a)
		}
	}
	return out
}

func (s *recordedServer) groups() []metav1.APIGroup {
	var out []metav1.APIGroup
	for _, a := range s.apis {
		if a.group == "" {
			continue
		}
		i := slices.IndexFunc(out, func(g metav1.APIGroup) bool { return g.Name == a.group })
		if i < 0 {
			out = append(out, metav1.APIGroup{TypeMeta: metav1.TypeMeta{Kind: "APIGroup", APIVersion: "v1"}, Name: a.group})
			i = len(out) - 1
		}
		v := metav1.GroupVersionForDiscovery{GroupVersion: a.group + "/" + a.version, Version: a.version}
		if !slices.Contains(out[i].Versions, v) {
			out[i].Versions = append(out[i].Versions, v)
		}
	}
	for i := range out {
		slices.SortFunc(out[i].Versions, func(a, b metav1.GroupVersionForDiscovery) int {
			return apiversion.CompareKubeAwareVersionStrings(b.Version, a.Version)
		})
		out[i].PreferredVersion = out[i].Versions[0]
	}
	return out
}

func (s *recordedServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet {
		s.mu.Lock()
		s.changed = append(s.changed, r.Method+" "+r.URL.Path)
		s.mu.Unlock()
	}
	answer := func(code int, v any) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(v) // the client reports a truncated answer
	}
	switch r.URL.Path {
	case "/version":
		answer(http.StatusOK, map[string]string{"major": "1", "minor": strconv.Itoa(s.minor), "gitVersion": s.gitVersion()})
		return
	case "/readyz":
		fmt.Fprintln(w, "[+]ping ok")
		return
	case "/metrics":
		fmt.Fprintf(w, "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds %d\n", time.Now().Add(-time.Hour).Unix())
		fmt.Fprintf(w, "# TYPE apiserver_request_total counter\napiserver_request_total 1000\n")
		size, label := "apiserver_storage_size_bytes", "storage_cluster_id"
		switch {
		case s.minor < 26:
			size, label = "etcd_db_total_size_in_bytes", "endpoint"
		case s.minor < 28:
			size, label = "apiserver_storage_db_total_size_in_bytes", "endpoint"
		}
		fmt.Fprintf(w, "# TYPE %s gauge\n%s{%s=\"etcd-0\"} %d\n", size, size, label, s.size)
		fmt.Fprintln(w, "# TYPE apiserver_requested_deprecated_apis gauge")
		for _, a := range s.leaving() {
			fmt.Fprintf(w, "apiserver_requested_deprecated_apis{group=%q,removed_release=\"1.%d\",resource=%q,subresource=\"\",version=%q} 1\n", a.group, s.minor+1, a.resource, a.version)
		}
		return
	case "/apis":
		answer(http.StatusOK, metav1.APIGroupList{TypeMeta: metav1.TypeMeta{Kind: "APIGroupList", APIVersion: "v1"}, Groups: s.groups()})
		return
	}
	for _, g := range s.groups() {
		if r.URL.Path == "/apis/"+g.Name {
			answer(http.StatusOK, g)
			return
		}
	}
	for i := range s.apis {
		a := &s.apis[i]
		if at := a.path(); r.URL.Path == at || strings.HasPrefix(r.URL.Path, path.Dir(at)+"/namespaces/") && path.Base(r.URL.Path) == a.resource && strings.Count(r.URL.Path, "/") == strings.Count(at, "/")+2 {
			answer(http.StatusOK, s.page(a, r))
			return
		}
	}
	answer(http.StatusNotFound, metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Reason: metav1.StatusReasonNotFound, Code: http.StatusNotFound,
		Message: "the server could not find the requested resource",
	})
}

// page is one page of a list.
func (s *recordedServer) page(a *recordedAPI, r *http.Request) any {
	type list struct {
		metav1.TypeMeta `json:",inline"`
		metav1.ListMeta `json:"metadata"`
		Items           []any `json:"items"`
	}
	l := list{TypeMeta: metav1.TypeMeta{APIVersion: strings.TrimPrefix(a.group+"/"+a.version, "/"), Kind: a.kind + "List"}, Items: []any{}}
	if strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadataList") {
		l.TypeMeta = metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadataList"}
	}
	l.ResourceVersion = "1"
	from, _ := strconv.Atoi(r.URL.Query().Get("continue"))
	to := s.counts[r.URL.Path]
	if limit, _ := strconv.Atoi(r.URL.Query().Get("limit")); limit > 0 && from+limit < to {
		to = from + limit
		l.Continue = strconv.Itoa(to)
	}
	for i := from; i < to; i++ {
		l.Items = append(l.Items, s.lists[r.URL.Path](i))
	}
	return l
}

// check runs `check` on the server.
func (s *recordedServer) check(t *testing.T, target string) check.ClusterCheck {
	t.Helper()
	server := httptest.NewServer(s)
	defer server.Close()
	sel, err := Select(cluster.Access{Kubeconfig: kubeconfigOf(t, "old", server.URL, "token: abc")}, "")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	k, err := Clusters{}.Check(ctx, sel, 0, check.ForeignRequest{Kubernetes: target}, func(plan.Event) {})
	if err != nil {
		t.Fatal(err)
	}
	if len(s.changed) > 0 {
		t.Errorf("requests that others could notice: %q", s.changed)
	}
	return k
}

// TestCheckOfServersOfEveryMinor checks API servers of v1.24 to v1.39. They are recorded: their APIs
// are those that Kubernetes published for the minor, and a client uses each API that the next minor
// removes. v1.38 and v1.39 are not published; they serve the APIs of v1.37. The golden file has all
// findings but those that are ok.
func TestCheckOfServersOfEveryMinor(t *testing.T) {
	var all bytes.Buffer
	for minor := 24; minor <= 39; minor++ {
		s := newRecordedServer(t, minor)
		k := s.check(t, "")
		if k.Kubernetes != s.gitVersion() || len(k.Hops) != 1 || k.Distribution.Name != "kubeadm" {
			t.Errorf("v1.%d: version %s, %d hops, distribution %s", minor, k.Kubernetes, len(k.Hops), k.Distribution.Name)
		}
		fmt.Fprintf(&all, "v1.%d to v1.%d\n", minor, minor+1)
		var used strings.Builder
		for _, f := range k.Findings() {
			if f.Severity != plan.Info {
				fmt.Fprintf(&all, "  %s %s: %s\n", f.Severity, f.ID, f.Title)
			}
			if f.Severity == plan.Block || f.Severity == plan.Warn {
				used.WriteString(f.Title + f.Detail + "\n")
			}
		}
		for _, a := range s.leaving() {
			if strings.Contains(a.version, "alpha") {
				continue // clients of an alpha API expect its end
			}
			if !strings.Contains(used.String(), a.resource) {
				t.Errorf("v1.%d: no finding says that v1.%d removes %s of %s/%s, which a client uses", minor, minor+1, a.resource, a.group, a.version)
			}
		}
	}
	golden.Equal(t, "testdata/minors.txt", all.Bytes())
}

// The metric with the size of etcd's database has had three names, and a check that finds none of
// them is not ok.
func TestSizeOfEtcdInEveryMinor(t *testing.T) {
	for _, minor := range []int{24, 25, 26, 27, 28, 37} {
		for size, want := range map[int64]plan.Severity{1 << 20: plan.Info, 2000 << 20: plan.Block, 0: plan.NotChecked} {
			s := newRecordedServer(t, minor)
			s.size = size
			k := s.check(t, "")
			found := k.Findings()
			if i := slices.IndexFunc(found, func(f plan.Finding) bool { return f.ID == "etcd-size" }); i < 0 || found[i].Severity != want {
				t.Errorf("v1.%d with %d bytes: finding %d of %+v, want %s", minor, size, i, found, want)
			}
		}
	}
}

// TestCheckOverManyMinors checks the longest path.
func TestCheckOverManyMinors(t *testing.T) {
	k := newRecordedServer(t, 25).check(t, "v1.37")
	if len(k.Hops) != 12 || k.Target != "v1.37.0" {
		t.Errorf("%d hops to %s, want 12 to v1.37.0", len(k.Hops), k.Target)
	}
}

// TestCheckOfALargeCluster reads 5,000 nodes, 50,000 pods and 10,000 kinds. The objects are made by
// the server for each page, as JSON, so that the figures are no benchmark.
func TestCheckOfALargeCluster(t *testing.T) {
	testneeds.Time(t, "20 s")
	s := newRecordedServer(t, 35)
	s.counts["/api/v1/nodes"] = 5000
	s.counts["/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"] = 5000
	s.add("/api/v1/pods", 50_000, func(i int) any {
		return corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("pod-%d", i), Namespace: fmt.Sprintf("team-%d", i%200), Labels: map[string]string{"app": strconv.Itoa(i / 10)}},
			Spec:       corev1.PodSpec{NodeName: fmt.Sprintf("node-%d", i%5000), Containers: []corev1.Container{{Name: "main", Image: "registry.example/app:1"}}},
			Status:     corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
		}
	})
	s.add("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", 10_000, func(i int) any {
		name := fmt.Sprintf("kind%d", i)
		return map[string]any{
			"metadata": map[string]any{"name": name + "s.example.com"},
			"spec": map[string]any{"group": "example.com", "scope": "Namespaced", "names": map[string]any{"plural": name + "s", "kind": name}, "versions": []any{
				map[string]any{"name": "v1", "served": true, "storage": true, "schema": map[string]any{"openAPIV3Schema": map[string]any{"type": "object", "description": strings.Repeat("the field of a kind ", 100)}}},
			}},
			"status": map[string]any{"storedVersions": []string{"v1"}, "acceptedNames": map[string]any{"plural": name + "s", "kind": name}, "conditions": []any{map[string]any{"type": "Established", "status": "True"}}},
		}
	})
	began := time.Now()
	k := s.check(t, "")
	t.Logf("checked in %s", time.Since(began).Round(time.Millisecond))
	for _, f := range k.Findings() {
		if f.Severity == plan.NotChecked && strings.Contains(f.Detail, "in time") {
			t.Errorf("%s: %s", f.Title, f.Detail)
		}
		// Findings are few, whatever the size: the rest is counted.
		if f.Severity == plan.Warn && f.ID != "unmanaged-pods" || f.Severity == plan.Block {
			t.Errorf("a finding about objects that have no trouble: %s: %s", f.ID, f.Title)
		}
	}
	pods := 0
	for _, f := range k.Findings() {
		if f.ID == "unmanaged-pods" {
			pods++
		}
	}
	if pods != 11 {
		t.Errorf("%d findings about pods of 200 namespaces, want 10 and the number of the others", pods)
	}
}
