package kubeadm

import (
	"bytes"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"constellation/engine/version"
	"constellation/internal/golden"
)

const joinToken = "abcdef.0123456789abcdef"

func exampleCluster(v string) Cluster {
	return Cluster{
		Name: "demo", Version: version.MustParse(v), Endpoint: "10.42.0.1:6443",
		PodCIDR: netip.MustParsePrefix("10.244.0.0/16"), ServiceCIDR: netip.MustParsePrefix("10.96.0.0/12"),
		CertSANs: []string{"demo.example", "127.0.0.1", "10.42.0.1"},
	}
}

func exampleNode() Node {
	return Node{Name: "control-plane-0", ProviderID: "sandbox://demo/control-plane-0", IP: netip.MustParseAddr("10.42.0.10")}
}

func exampleJoin(controlPlane bool) Join {
	return Join{
		ControlPlane: controlPlane, Endpoint: "10.42.0.1:6443", Token: joinToken,
		CAHash: "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
	}
}

func configs(t *testing.T) map[string]Config {
	t.Helper()
	m := map[string]Config{}
	for _, v := range []string{"v1.34.4", "v1.35.4", "v1.36.4", "v1.37.2"} {
		c, err := NewInit(exampleCluster(v), exampleNode())
		if err != nil {
			t.Fatal(err)
		}
		m["init-"+v] = c
	}
	for name, cp := range map[string]bool{"join-worker": false, "join-control-plane": true} {
		c, err := NewJoin(exampleJoin(cp), exampleNode())
		if err != nil {
			t.Fatal(err)
		}
		m[name] = c
		m[name+"-patched"] = c.WithPatches(PatchesDir)
	}
	c, err := NewUpgrade(Upgrade{Version: version.MustParse("v1.36.4"), IgnorePreflightErrors: []string{"SystemVerification", "Swap"}})
	if err != nil {
		t.Fatal(err)
	}
	m["upgrade"] = c
	if c, err = NewUpgrade(Upgrade{Version: version.MustParse("v1.36.4"), ImagePullPolicy: "Never"}); err != nil {
		t.Fatal(err)
	}
	m["upgrade-customised"] = c.WithPatches(PatchesDir)
	if c, err = m["upgrade"].WithPatches(PatchesDir).WithHost([]byte(hostUpgradeExample)); err != nil {
		t.Fatal(err)
	}
	m["upgrade-of-host"] = c
	if c, err = NewInit(exampleCluster("v1.36.4"), exampleNode()); err != nil {
		t.Fatal(err)
	}
	m["init-v1.36.4-patched"] = c.WithPatches(PatchesDir)
	newer := exampleCluster("v1.36.4")
	newer.EtcdTag = "3.6.11-0"
	if c, err = NewInit(newer, exampleNode()); err != nil {
		t.Fatal(err)
	}
	m["init-v1.36.4-etcd"] = c
	m["init-v1.36.4-plain"] = without(t, "v1.36.4", ItemNames()...)
	secret := exampleCluster("v1.36.4")
	secret.EncryptSecrets = true
	if c, err = NewInit(secret, exampleNode()); err != nil {
		t.Fatal(err)
	}
	m["init-v1.36.4-encrypted"] = c
	return m
}

const hostUpgradeExample = `apiVersion: kubeadm.k8s.io/v1beta4
kind: UpgradeConfiguration
apply:
  certificateRenewal: false
  imagePullPolicy: Always
  imagePullSerial: true
  ignorePreflightErrors: [Swap, CreateJob]
  skipPhases: [addon/coredns, bootstrap-token]
node:
  etcdUpgrade: false
  patches: {directory: /srv/patches}
`

// An option that cannot be kept stops the upgrade with its name.
func TestUpgradeOptionsOfAHostAreChecked(t *testing.T) {
	const head = "apiVersion: kubeadm.k8s.io/v1beta4\nkind: UpgradeConfiguration\n"
	u, err := NewUpgrade(Upgrade{Version: version.MustParse("v1.36.4")})
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ what, doc, want string }{
		{what: "not YAML", doc: "\t", want: "parse it"},
		{what: "nothing", doc: "", want: "it is empty"},
		{what: "another kind", doc: "apiVersion: kubeadm.k8s.io/v1beta4\nkind: JoinConfiguration\n", want: `kind "JoinConfiguration"`},
		{what: "another version", doc: "apiVersion: kubeadm.k8s.io/v1beta3\nkind: UpgradeConfiguration\n", want: `apiVersion "kubeadm.k8s.io/v1beta3"`},
		{what: "a version of Kubernetes", doc: head + "apply: {kubernetesVersion: v1.37.2}\n", want: "kubernetesVersion"},
		{what: "an unknown field", doc: head + "node: {certificateRenewals: true}\n", want: "certificateRenewals"},
		{what: "two documents", doc: head + "---\n" + head, want: "more than one document"},
		{what: "all checks", doc: head + "apply: {ignorePreflightErrors: [all]}\n", want: `apply: "all" is not the name of one check`},
		{what: "a pull policy", doc: head + "node: {imagePullPolicy: Sometimes}\n", want: "node: image pull policy"},
		{what: "a phase that must run", doc: head + "apply: {skipPhases: [addon, control-plane]}\n", want: "phase control-plane cannot be skipped"},
		{what: "a part of one", doc: head + "node: {skipPhases: [upload-config/kubeadm]}\n", want: "phase upload-config/kubeadm cannot be skipped"},
		{what: "no phase", doc: head + "node: {skipPhases: ['--force']}\n", want: "not the name of a phase"},
		{what: "relative patches", doc: head + "node: {patches: {directory: patches}}\n", want: "not an absolute path"},
		{what: "a long file", doc: head + strings.Repeat("# long\n", maxUpgradeFile/7), want: "the limit is 65536"},
	} {
		t.Run(tt.what, func(t *testing.T) {
			c, err := u.WithHost([]byte(tt.doc))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
			if diff := cmp.Diff(u, c); diff != "" {
				t.Errorf("the configuration changed:\n%s", diff)
			}
		})
	}
	if c, err := u.WithHost([]byte(head)); err != nil || cmp.Diff(u, c) != "" {
		t.Errorf("without options: %v\n%s", err, cmp.Diff(u, c))
	}
}

func TestConfigurationIsAsRecorded(t *testing.T) {
	for name, c := range configs(t) {
		t.Run(name, func(t *testing.T) {
			if c.Init != nil {
				token := c.Init.BootstrapTokens[0].Token
				if !ValidToken(token) {
					t.Errorf("token %q", token)
				}
				init := *c.Init
				init.BootstrapTokens = []BootstrapToken{init.BootstrapTokens[0]}
				init.BootstrapTokens[0].Token = joinToken
				c.Init = &init
			}
			got, err := c.YAML()
			if err != nil {
				t.Fatal(err)
			}
			file := filepath.Join("testdata", name+".yaml")
			golden.Equal(t, file, got)
		})
	}
}

func TestTokensOfInitAreNeverTheSame(t *testing.T) {
	a, err := NewInit(exampleCluster("v1.35.4"), exampleNode())
	if err != nil {
		t.Fatal(err)
	}
	b, _ := NewInit(exampleCluster("v1.35.4"), exampleNode())
	if a.Init.BootstrapTokens[0].Token == b.Init.BootstrapTokens[0].Token {
		t.Error("the same token twice")
	}
}

func TestRangesOfPods(t *testing.T) {
	for _, divide := range []bool{false, true} {
		c := exampleCluster("v1.36.4")
		c.DividePods = divide
		config, err := NewInit(c, exampleNode())
		if err != nil {
			t.Fatal(err)
		}
		if b, _ := config.YAML(); !bytes.Contains(b, fmt.Appendf(nil, "name: allocate-node-cidrs\n      value: \"%t\"", divide)) {
			t.Errorf("DividePods %t:\n%s", divide, b)
		}
	}
}

func TestInputNeverBecomesSyntax(t *testing.T) {
	c := exampleCluster("v1.35.4")
	c.Name = "x\nkubernetesVersion: v0.0.0\n---\nkind: Other"
	config, err := NewInit(c, exampleNode())
	if err != nil {
		t.Fatal(err)
	}
	b, _ := config.YAML()
	if n := bytes.Count(b, []byte("\n---\n")); n != 3 {
		t.Errorf("%d separators, want 3:\n%s", n, b)
	}
	if bytes.Contains(b, []byte("\nkubernetesVersion: v0.0.0")) {
		t.Errorf("the name became a field:\n%s", b)
	}
}

func TestIncompleteInputIsNamed(t *testing.T) {
	for _, tt := range []struct {
		name string
		err  func() error
		want string
	}{
		{name: "no cluster name", err: func() error {
			c := exampleCluster("v1.35.4")
			c.Name = ""
			_, err := NewInit(c, exampleNode())
			return err
		}, want: "name of the cluster"},
		{name: "nothing at all", err: func() error { _, err := NewInit(Cluster{}, Node{}); return err }, want: "service range is missing"},
		{name: "no provider ID", err: func() error {
			n := exampleNode()
			n.ProviderID = ""
			_, err := NewJoin(exampleJoin(false), n)
			return err
		}, want: "provider ID"},
		{name: "endpoint without a port", err: func() error {
			j := exampleJoin(false)
			j.Endpoint = "10.42.0.1"
			_, err := NewJoin(j, exampleNode())
			return err
		}, want: "host:port"},
		{name: "bad token", err: func() error {
			j := exampleJoin(false)
			j.Token = "canary"
			_, err := NewJoin(j, exampleNode())
			return err
		}, want: "token is malformed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := tt.err()
			if err == nil || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "canary") {
				t.Errorf("got %v", err)
			}
		})
	}
}
