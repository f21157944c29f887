package main

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"constellation/engine/plan"
	"constellation/engine/sandbox/controlplane"
	"constellation/engine/workspace"
	"constellation/tui"
)

// canaries are secrets that the test searches where they must not occur.
type canaries struct {
	values map[string]string // by their description
}

// plant returns a new canary.
func (c *canaries) plant(what string) string {
	v := fmt.Sprintf("canary%04dZ%s", 1000+37*len(c.values), strings.Repeat("q7", 6))
	c.values[what] = v
	return v
}

// in returns the canaries that occur in text, in any encoding.
func (c *canaries) in(text []byte) (found []string) {
	for what, v := range c.values {
		forms := []string{v, url.QueryEscape(v), fmt.Sprintf("%x", v)}
		for at := range 3 { // at any offset of the encoded data
			b := base64.RawStdEncoding.EncodeToString([]byte(strings.Repeat("x", at) + v))
			forms = append(forms, b[4:len(b)-4])
		}
		if slices.ContainsFunc(forms, func(f string) bool { return bytes.Contains(text, []byte(f)) }) {
			found = append(found, what)
		}
	}
	slices.Sort(found)
	return found
}

// Secrets occur only in the files meant for them, and not in output, logs, records or objects
// of the cluster.
func TestBackupsDoNotLeakSecrets(t *testing.T) {
	cp := controlplane.ForTest(t, controlplane.Options{APIServerArgs: []string{"--disable-admission-plugins=ServiceAccount"}})
	ctx := t.Context()
	config := cp.Config()
	config.WarningHandler = rest.NoWarnings{} // the certificate is not a secret
	core, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	dyn, err := dynamic.NewForConfig(cp.Config())
	if err != nil {
		t.Fatal(err)
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	apply := func(manifest string) {
		t.Helper()
		must(cp.Apply(ctx, []byte(manifest)))
	}

	// The kubeconfig authenticates with a token.
	apply("apiVersion: v1\nkind: ServiceAccount\nmetadata: {name: admin, namespace: kube-system}\n---\n" +
		"apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRoleBinding\nmetadata: {name: admin}\nroleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: cluster-admin}\n" +
		"subjects: [{kind: ServiceAccount, name: admin, namespace: kube-system}]\n")
	token, err := core.CoreV1().ServiceAccounts("kube-system").CreateToken(ctx, "admin", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	must(err)
	kubeconfig, err := clientcmd.Write(clientcmdapi.Config{
		Clusters:  map[string]*clientcmdapi.Cluster{"c": {Server: cp.Config().Host, CertificateAuthorityData: cp.Config().CAData}},
		AuthInfos: map[string]*clientcmdapi.AuthInfo{"u": {Token: token.Status.Token}},
		Contexts:  map[string]*clientcmdapi.Context{"x": {Cluster: "c", AuthInfo: "u"}}, CurrentContext: "x",
	})
	must(err)
	ws := t.TempDir()
	must(os.WriteFile(filepath.Join(ws, workspace.KubeconfigFile), kubeconfig, 0o600))
	w, err := workspace.OpenWorkspace(ws)
	must(err)
	must(w.WriteMasterSecret(workspace.NewMasterSecret())) // it authenticates the backups
	planted := &canaries{values: map[string]string{}}

	secret := func(name string, kind corev1.SecretType, data map[string]string, notes map[string]string) {
		t.Helper()
		s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", Annotations: notes}, Type: kind, StringData: data}
		if kind == corev1.SecretTypeBootstrapToken {
			s.Namespace = "kube-system"
		}
		if kind == "helm.sh/release.v1" {
			s.Labels = map[string]string{"owner": "helm", "name": "x", "version": "1"}
		}
		_, err := core.CoreV1().Secrets(s.Namespace).Create(ctx, s, metav1.CreateOptions{})
		must(err)
	}
	opaque := planted.plant("opaque")
	secret("opaque", corev1.SecretTypeOpaque, map[string]string{"password": opaque}, map[string]string{"kubectl.kubernetes.io/last-applied-configuration": `{"stringData":{"password":"` + opaque + `"}}`})
	secret("basic", corev1.SecretTypeBasicAuth, map[string]string{"username": "u", "password": planted.plant("basic-auth")}, nil)
	secret("ssh", corev1.SecretTypeSSHAuth, map[string]string{"ssh-privatekey": planted.plant("ssh-auth")}, nil)
	secret("tls", corev1.SecretTypeTLS, map[string]string{"tls.crt": "x", "tls.key": planted.plant("tls")}, nil)
	secret("registry", corev1.SecretTypeDockerConfigJson, map[string]string{".dockerconfigjson": `{"auths":{"r":{"auth":"` + planted.plant("registry") + `"}}}`}, nil)
	secret("token", corev1.SecretTypeServiceAccountToken, map[string]string{"token": planted.plant("service account token")}, map[string]string{"kubernetes.io/service-account.name": "default"})
	secret("bootstrap-token-abcdef", corev1.SecretTypeBootstrapToken, map[string]string{"token-id": "abcdef", "token-secret": planted.plant("bootstrap token")}, nil)
	secret("sh.helm.release.v1.x.v1", "helm.sh/release.v1", map[string]string{"release": planted.plant("helm")}, nil)

	// One custom resource refers to a Secret; another one contains a secret.
	kind := func(schema string) string {
		return `{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"widgets.example.com"},"spec":{"group":"example.com","scope":"Namespaced","names":{"plural":"widgets","singular":"widget","kind":"Widget","listKind":"WidgetList"},
			"versions":[{"name":"v1","served":true,"storage":true,"schema":{"openAPIV3Schema":{"type":"object","properties":{"spec":` + schema + `}}}}]}}`
	}
	apply(kind(`{"type":"object","x-kubernetes-preserve-unknown-fields":true}`))
	widgets := dyn.Resource(schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "widgets"}).Namespace("default")
	widget := func(name string, spec map[string]any) {
		t.Helper()
		_, err := widgets.Create(ctx, &unstructured.Unstructured{Object: map[string]any{"apiVersion": "example.com/v1", "kind": "Widget", "metadata": map[string]any{"name": name}, "spec": spec}}, metav1.CreateOptions{})
		must(err)
	}
	widget("names-one", map[string]any{"secretRef": map[string]any{"name": "opaque"}})
	widget("has-one", map[string]any{"token": planted.plant("custom resource")})
	planted.values["token of the kubeconfig"] = token.Status.Token

	// run runs a verb and returns its output, which must not contain a secret.
	run := func(want int, args ...string) string {
		t.Helper()
		var out, errs bytes.Buffer
		code := tui.App{
			Release: "v1.1.0", Program: "constellation", Engine: newEngine, Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errs,
			Env: func(k string) string { return map[string]string{"LANG": "C.UTF-8"}[k] },
		}.Run(slices.Concat([]string{"-C", ws}, args))
		said := slices.Concat(out.Bytes(), errs.Bytes())
		if found := planted.in(said); len(found) > 0 {
			t.Errorf("%q prints secrets: %q\n%s", args, found, said)
		}
		if code != want {
			t.Fatalf("%q: exit %d, want %d\n%s", args, code, want, said)
		}
		return out.String()
	}
	// both runs a read-only verb with text and JSON output.
	both := func(want int, args ...string) string {
		t.Helper()
		run(want, args...)
		return run(want, append(args, "-o", "json", "--debug")...)
	}
	newest := func() string {
		t.Helper()
		var list struct{ Backups []struct{ ID string } }
		must(json.Unmarshal([]byte(both(0, "backup", "list")), &list))
		return list.Backups[0].ID
	}
	run(0, "backup", "create", "-o", "json", "--debug")
	plain := newest()
	run(0, "backup", "create", "--secrets")
	all := newest()
	if plain == all {
		t.Fatalf("both backups are %s", all)
	}
	for _, id := range []string{plain, all} {
		both(0, "backup", "show", id)
		both(0, "backup", "verify", id)
	}

	// The current values are secret, too.
	for _, name := range []string{"opaque", "ssh", "tls", "registry"} {
		s, err := core.CoreV1().Secrets("default").Get(ctx, name, metav1.GetOptions{})
		must(err)
		for k, v := range s.Data {
			if k != "tls.crt" && k != ".dockerconfigjson" {
				s.Data[k] = []byte(planted.plant(name + " as it is now"))
			} else if k == ".dockerconfigjson" {
				s.Data[k] = bytes.Replace(v, []byte(planted.values["registry"]), []byte(planted.plant("registry as it is now")), 1)
			}
		}
		_, err = core.CoreV1().Secrets("default").Update(ctx, s, metav1.UpdateOptions{})
		must(err)
	}
	must(core.CoreV1().Secrets("default").Delete(ctx, "basic", metav1.DeleteOptions{}))
	must(core.CoreV1().Secrets("default").Delete(ctx, "sh.helm.release.v1.x.v1", metav1.DeleteOptions{}))
	secret("new", corev1.SecretTypeOpaque, map[string]string{"password": planted.plant("new")}, nil)
	must(widgets.Delete(ctx, "has-one", metav1.DeleteOptions{}))
	widget("has-one", map[string]any{"token": planted.plant("custom resource as it is now")})
	for id, want := range map[string]int{plain: 2, all: 8} {
		var differ struct{ Differences []any }
		must(json.Unmarshal([]byte(both(plan.ExitDiffers, "backup", "diff", id)), &differ))
		if len(differ.Differences) != want {
			t.Errorf("%d differences of backup %s, want %d: %v", len(differ.Differences), id, want, differ.Differences)
		}
	}
	both(plan.ExitDone, "backup", "restore", all, "--dry-run", "--overwrite")
	run(plan.ExitUnacknowledged, "backup", "restore", all, "--overwrite")
	run(plan.ExitDone, "backup", "restore", all, "--overwrite", "--yes", "-o", "json", "--debug", "--only", "core/secrets")
	run(plan.ExitDone, "backup", "restore", plain, "--yes", "--overwrite")

	// The error of an API server that rejects an object contains the rejected value.
	refuse := []string{
		`{"type":"object","properties":{"token":{"type":"string","pattern":"^x$"}}}`, `{"type":"object","properties":{"token":{"type":"string","enum":["x"]}}}`,
		`{"type":"object","properties":{"token":{"type":"string","format":"date-time"}}}`, `{"type":"object","properties":{"token":{"type":"integer"}}}`,
		`{"type":"object","properties":{"token":{"type":"string","maxLength":3}},"x-kubernetes-validations":[{"rule":"!has(self.token) || self.token == 'x'","messageExpression":"'it is ' + self.token"}]}`,
		`{"type":"object"}`,
	}
	for i, strict := range refuse {
		must(widgets.Delete(ctx, "has-one", metav1.DeleteOptions{}))
		apply(kind(strict))
		probe := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "example.com/v1", "kind": "Widget", "metadata": map[string]any{"name": "probe"}, "spec": map[string]any{"token": "short"}}}
		for { // until the API server judges by the new schema
			_, err := widgets.Create(ctx, probe, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}, FieldValidation: "Strict"})
			if err != nil {
				break
			}
			time.Sleep(20 * time.Millisecond)
		}
		said := both(plan.ExitFailed, "backup", "restore", plain, "--dry-run", "--only", "example.com/widgets")
		if !strings.Contains(said, `"failed"`) || !strings.Contains(said, "spec") {
			t.Errorf("schema %d: no error reported: %s", i, said)
		}
		run(plan.ExitFailed, "backup", "restore", all, "--yes", "--only", "example.com/widgets")
		apply(kind(`{"type":"object","x-kubernetes-preserve-unknown-fields":true}`))
		for {
			if _, err := widgets.Create(ctx, probe, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}, FieldValidation: "Strict"}); err == nil {
				break
			}
			time.Sleep(20 * time.Millisecond)
		}
		run(plan.ExitDone, "backup", "restore", plain, "--yes", "--only", "example.com/widgets")
	}

	// Check all files, records of runs included.
	held := map[string][]string{}
	files := 0
	must(filepath.WalkDir(ws, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		files++
		info, err := d.Info()
		if err != nil {
			return err
		}
		text, err := os.ReadFile(path)
		name, _ := filepath.Rel(ws, path)
		name = strings.NewReplacer(plain, "plain", all, "all").Replace(strings.TrimPrefix(name, "constellation-upgrade/"))
		if in := planted.in(text); len(in) > 0 {
			if held[name] = in; info.Mode().Perm() != 0o600 {
				t.Errorf("%s: mode %v", path, info.Mode())
			}
		}
		return err
	}))
	want := map[string][]string{
		workspace.KubeconfigFile:                 {"token of the kubeconfig"},
		"plain/backups/example.com/widgets.json": {"custom resource"}, "plain/backups/helm/releases.json": {"helm"},
		"all/backups/example.com/widgets.json": {"custom resource"}, "all/backups/helm/releases.json": {"helm"},
		"all/backups/core/secrets.json": {"basic-auth", "bootstrap token", "opaque", "registry", "service account token", "ssh-auth", "tls"},
	}
	if d := cmp.Diff(want, held); d != "" || files < 30 {
		t.Errorf("secrets in %d files (-want +got):\n%s", files, d)
	}
	for what, list := range map[string]func() (any, error){
		"events":     func() (any, error) { return core.CoreV1().Events("").List(ctx, metav1.ListOptions{}) },
		"ConfigMaps": func() (any, error) { return core.CoreV1().ConfigMaps("").List(ctx, metav1.ListOptions{}) },
	} {
		l, err := list()
		must(err)
		text, err := json.Marshal(l)
		must(err)
		if found := planted.in(text); len(found) > 0 {
			t.Errorf("%s of the cluster contain %q", what, found)
		}
	}
}
