package workspace

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"constellation/engine/plan"
	"constellation/engine/release"
	"constellation/engine/version"
)

// testRoot returns a certificate in PEM.
func testRoot(t testing.TB) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "cloud"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

// publicKey returns a key in PEM that could sign a feed.
func publicKey(t testing.TB) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
}

func testSandbox(t testing.TB) *SandboxInfo {
	return &SandboxInfo{
		Name: "demo", UID: "0123456789abcdef", Release: "v1.1.0", Kubernetes: "v1.35.4", Image: "v1.0.0",
		Measurements: map[uint32]string{4: strings.Repeat("a4", 32), 9: strings.Repeat("09", 32), 11: strings.Repeat("b1", 32)},
		TrustRoots:   testRoot(t), ClusterEndpoint: "127.0.0.1:36443", InitEndpoint: "127.0.0.1:39000", InClusterEndpoint: "10.42.0.1",
		NodeCIDR: "10.42.0.0/24", PodCIDR: "10.244.0.0/16", ServiceCIDR: "10.96.0.0/12", ControlPlanes: 3, Workers: 1,
		Socket: "/run/sandbox/demo/api.sock", InitSecret: []byte("0123456789abcdef0123456789abcdef"),
	}
}

func testConfig(t testing.TB) string {
	t.Helper()
	b, err := GenerateConfig("sandbox", GenerateOptions{Sandbox: testSandbox(t)})
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestGeneratedConfigSaysWhatTheSandboxIs(t *testing.T) {
	text := testConfig(t)
	c, err := ParseConfig([]byte(text))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if c.Name != "demo" || c.Kubernetes.String() != "v1.35.4" || c.Image.String() != "v1.0.0" || c.Services.String() != "v1.1.0" ||
		c.ControlPlanes() != 3 || c.Workers() != 1 || c.Provider.Name != "sandbox" || len(c.Attestation.TPM2.Measurements) != 3 {
		t.Errorf("read %+v", c)
	}
	if !strings.Contains(text, "# Groups of equal machines") {
		t.Error("the comments are gone")
	}
}

// The commented example becomes a valid chart when it is uncommented and given a digest.
func TestChartOfAGeneratedConfigIsAnExample(t *testing.T) {
	text := testConfig(t)
	i := strings.Index(text, "\n# charts:\n")
	if i < 0 {
		t.Fatalf("there is none:\n%s", text)
	}
	digest := "sha256:" + strings.Repeat("8a", 32)
	text = text[:i] + strings.Replace(strings.ReplaceAll(text[i:], "\n# ", "\n"), "sha256:...", digest, 1)
	c, err := ParseConfig([]byte(text))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	want := []release.Chart{{
		Name: "certs", Chart: "cert-manager", Namespace: "cert-manager", Source: "https://charts.example.com", Version: "v1.19.1", Digest: digest,
		Values: map[string]any{"crds": map[string]any{"enabled": true}}, Needs: []string{},
	}}
	if d := cmp.Diff(want, c.Charts, cmpopts.EquateEmpty()); d != "" {
		t.Error(d)
	}
}

func TestGeneratedConfigWithoutASandboxSaysWhatIsMissing(t *testing.T) {
	b, err := GenerateConfig("sandbox", GenerateOptions{Name: "prod"})
	if err != nil {
		t.Fatal(err)
	}
	_, err = ParseConfig(b)
	list, ok := AsConfigErrors(err)
	if !ok {
		t.Fatalf("got %v", err)
	}
	for _, e := range list.Errors {
		if !strings.HasPrefix(e.Field, "attestation.tpm2.") || e.Remedy == "" {
			t.Errorf("%v", e)
		}
	}
	if len(list.Errors) != 4 { // three placeholders and the trust roots
		t.Errorf("%v", list)
	}
}

func TestGenerateRefusesWhatValidateWouldRefuse(t *testing.T) {
	for _, tt := range []struct {
		name, provider string
		o              GenerateOptions
		want           string
	}{
		{name: "a provider that does not exist", provider: "moon", o: GenerateOptions{}, want: "moon is not in this release"},
		{name: "a name in capitals", provider: "sandbox", o: GenerateOptions{Name: "Demo"}, want: "cannot name a cluster"},
		{name: "a minor without patch", provider: "sandbox", o: GenerateOptions{Kubernetes: "1.35"}, want: "not a full version"},
		{name: "YAML in a name", provider: "sandbox", o: GenerateOptions{Name: "a\nimage: v9"}, want: "problem"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := GenerateConfig(tt.provider, tt.o)
			if err == nil || !strings.Contains(err.Error(), tt.want) || plan.ExitCode(err) != plan.ExitUsage {
				t.Errorf("got %v (exit %d), want %q", err, plan.ExitCode(err), tt.want)
			}
		})
	}
}

func TestConfigProblems(t *testing.T) {
	good := testConfig(t)
	line := func(text, part string) int {
		for i, l := range strings.Split(text, "\n") {
			if strings.Contains(l, part) {
				return i + 1
			}
		}
		t.Fatalf("no line with %q", part)
		return 0
	}
	roots := func(why string) FieldError {
		return FieldError{
			"attestation.tpm2.trustRoots", line(good, "trustRoots"), "cannot be used (read trust roots: " + why + ")",
			"paste the PEM certificates of the cloud that certifies attestation keys, after a |, and nothing else",
		}
	}
	feedExample := "# releases:"
	feed := func(problem, remedy string) []FieldError {
		return []FieldError{{"releases.feed", line(good, feedExample), problem, remedy}}
	}
	keys := func(problem string) []FieldError {
		return []FieldError{{"releases.keys", line(good, feedExample), "cannot be used (read key releases.keys: " + problem + ")", "paste the public keys in PEM after a |, and nothing else; `constellation release key new` makes a pair"}}
	}
	for _, tt := range []struct {
		name     string
		old, new string // replaced in a good file
		want     []FieldError
	}{
		{name: "a registry with a scheme", old: feedExample, new: "registry: {address: \"https://registry.example.com\"}\n# releases:", want: []FieldError{{
			"registry.address", line(good, feedExample), "has a scheme", "write host and path alone, such as registry.example.com/path: pulls use https",
		}}},
		{name: "a registry without an address", old: feedExample, new: "registry: {pullSecret: a}\n# releases:", want: []FieldError{{"registry.address", 0, "is missing", "`constellation config generate` shows an example"}}},
		{name: "a registry with other authorities", old: feedExample, new: "registry: {address: registry.example.com, caBundle: x}\n# releases:", want: []FieldError{{
			"registry.caBundle", line(good, feedExample), "is not a list of PEM certificates", "paste the PEM certificates after a |, and nothing else",
		}}},
		{name: "an unknown key close to a known one", old: "podCIDR:", new: "podCidr:", want: []FieldError{{"podCidr", line(good, "podCIDR:"), "is not known", "did you mean podCIDR?"}}},
		{name: "an unknown key like no other", old: "podCIDR:", new: "flavour:", want: []FieldError{{
			"flavour", line(good, "podCIDR:"), "is not known",
			"known here: attestation, backup, charts, encryptSecrets, hardening, image, keepWorkers, kubernetesVersion, microserviceVersion, name, nodeGroups, plans, podCIDR, provider, registry, releases, serviceCIDR, version",
		}}},
		{name: "a text where a number belongs", old: "count: 3", new: "count: three", want: []FieldError{{"nodeGroups.control-plane.count", line(good, "count: 3"), `is the text "three", want a number`, "write a number from 1 to 5000, without quotes"}}},
		{name: "no control plane", old: "count: 3", new: "count: 0", want: []FieldError{{"nodeGroups.control-plane.count", line(good, "count: 3"), "is 0, want 1 to 5000", ""}}},
		{name: "a list where a name belongs", old: "\nname: demo\n\n", new: "\nname: [demo]\n\n", want: []FieldError{{"name", line(good, "name: demo"), "is a list, want a text", "put the value in quotes"}}},
		{name: "a word that YAML takes for a truth", old: "\nname: demo\n\n", new: "\nname: yes\n\n", want: nil},
		{name: "a boolean for a name", old: "\nname: demo\n\n", new: "\nname: true\n\n", want: []FieldError{{"name", line(good, "name: demo"), "is the word true, which YAML reads as true or false, want a text", "put the value in quotes"}}},
		{name: "a missing field", old: "image: v1.0.0\n", want: []FieldError{{"image", 0, "is missing", "`constellation config generate` shows an example"}}},
		{name: "an empty field", old: "image: v1.0.0\n", new: "image:\n", want: []FieldError{{"image", line(good, "image: v1"), "is empty, want a text", "put the value in quotes"}}},
		{name: "a minor", old: "kubernetesVersion: v1.35.4", new: "kubernetesVersion: 1.35", want: []FieldError{{"kubernetesVersion", line(good, "kubernetesVersion"), `"1.35" is not a full version`, "write major, minor and patch, such as v1.35.4"}}},
		{name: "a provider of another release", old: "  sandbox:\n    name: demo", new: "  moon:\n    project: p", want: []FieldError{{"provider.moon", line(good, "  sandbox:"), "is not in this release", "use enrolled, gcp or sandbox"}}},
		{name: "no section provider", old: "provider:\n  sandbox:\n    name: demo\n", want: []FieldError{{"provider", 0, "is missing", "write it with enrolled, gcp or sandbox: below it"}}},
		{name: "no provider", old: "  sandbox:\n    name: demo", new: "  {}", want: []FieldError{{"provider", line(good, "provider:"), "names no provider", "write enrolled, gcp or sandbox: below it"}}},
		{name: "an unknown role", old: "role: worker", new: "role: wroker", want: []FieldError{{"nodeGroups.workers.role", line(good, "role: worker"), `"wroker" is no role`, "write control-plane or worker"}}},
		{name: "ranges that overlap", old: "podCIDR: 10.244.0.0/16", new: "podCIDR: 10.100.0.0/16", want: []FieldError{{"podCIDR", line(good, "podCIDR:"), "10.100.0.0/16 overlaps serviceCIDR 10.96.0.0/12", "pods and services need ranges of their own"}}},
		{name: "an address that is no range", old: "podCIDR: 10.244.0.0/16", new: "podCIDR: 10.244.0.1/16", want: []FieldError{{"podCIDR", line(good, "podCIDR:"), "10.244.0.1/16 has bits beyond its length", "write 10.244.0.0/16"}}},
		{name: "a measurement cut short", old: strings.Repeat("09", 32), new: "0909", want: []FieldError{{"attestation.tpm2.measurements.9.expected", line(good, "0909"), `"0909" is not 64 hex digits`, "copy the value that belongs to the image"}}},
		{name: "a placeholder", old: strings.Repeat("09", 32), new: strings.Repeat("1234", 16), want: []FieldError{{"attestation.tpm2.measurements.9", line(good, "      9:"), "is a placeholder", "run `constellation sandbox up`, which fills in the measurements of the sandbox's image"}}},
		{name: "the cluster's register", old: "      4:\n", new: "      15:\n", want: []FieldError{{"attestation.tpm2.measurements.15", line(good, "      4:"), "is the register that carries the cluster ID", "remove it: the program computes its value"}}},
		{name: "nothing enforced", old: "warnOnly: false", new: "warnOnly: true", want: []FieldError{{"attestation.tpm2.measurements", line(good, "    measurements:"), "enforces nothing: any machine would be accepted", "give at least one register without warnOnly"}}},
		{name: "a key twice", old: "\nname: demo\n\n", new: "\nname: demo\nname: demo\n\n", want: []FieldError{{"name", line(good, "name: demo") + 1, "occurs twice", "remove one of them"}}},
		{name: "the format of release v1.0.0", old: "version: v2", new: "version: v1", want: []FieldError{{"version", line(good, "version: v2"), "v1 is the format of release v1.0.0", "run `constellation config migrate`"}}},
		{name: "the format of a later release", old: "version: v2", new: "version: v7", want: []FieldError{{"version", line(good, "version: v2"), `the text "v7" is not a format that this program reads`, "use the program that wrote it, or `constellation config generate` for a new one"}}},
		{name: "broken YAML", old: "nodeGroups:\n", new: "nodeGroups\n", want: []FieldError{{"", line(good, "nodeGroups:"), "is not YAML: could not find expected ':'", "check indentation, colons and quotes near this line"}}},
		{name: "an invalid certificate", old: "-----BEGIN CERTIFICATE-----", new: "-----BEGIN CERT-----", want: []FieldError{roots("it is not PEM")}},
		{name: "text between certificates", old: "    trustRoots: |\n", new: "    trustRoots: |\n      the root of 2026:\n", want: []FieldError{roots("it holds a damaged PEM block, or text beside its PEM blocks")}},
		{name: "workers kept by a word", old: "# keepWorkers: false", new: "keepWorkers: maybe", want: []FieldError{{"keepWorkers", line(good, "# keepWorkers:"), `is the text "maybe", want true or false`, ""}}},
		{name: "hardening that is fine", old: feedExample, new: "hardening: {eventRateLimit: false, tls: true}\n# releases:", want: nil},
		{name: "an unknown item of hardening", old: feedExample, new: "hardening: {podSecurty: false}\n# releases:", want: []FieldError{{"hardening.podSecurty", line(good, feedExample), "is not known", "did you mean podSecurity?"}}},
		{name: "hardening as a list", old: feedExample, new: "hardening: [tls]\n# releases:", want: []FieldError{{"hardening", line(good, feedExample), "is a list, want keys and values", "indent its fields below it"}}},
		{name: "an item of hardening by a word", old: feedExample, new: "hardening: {tls: weak}\n# releases:", want: []FieldError{{"hardening.tls", line(good, feedExample), `is the text "weak", want true or false`, ""}}},
		{name: "releases without a feed", old: "# releases:\n#   feed: https://releases.example/v1\n", new: "releases: {}\n", want: []FieldError{{"releases.feed", 0, "is missing", "`constellation config generate` shows an example"}}},
		{name: "a feed over the wire in the clear", old: feedExample, new: "releases: {feed: http://releases.example}", want: feed("is not encrypted", "write https://; http is for this computer only")},
		{name: "a feed with credentials", old: feedExample, new: "releases: {feed: https://me:secret@releases.example}", want: feed("holds credentials", "a feed is public: its files are signed")},
		{name: "a feed of another kind", old: feedExample, new: "releases: {feed: ftp://releases.example}", want: feed(`has the scheme "ftp"`, "write an https address, or the path of a directory")},
		{name: "a feed without a host", old: feedExample, new: "releases: {feed: 'https:///v1'}", want: feed("is no address of a feed", "write it as https://host/path")},
		{name: "charts that are fine", old: feedExample, new: "charts:\n- {name: cni, namespace: kube-system, source: 'file:charts', version: 1.0.0, digest: 'sha256:" + strings.Repeat("a", 64) + "', values: {a: {b: [1]}}}\n- {name: web, namespace: web, source: 'oci://ghcr.io/example/web', version: v1.0.0, digest: 'sha256:" + strings.Repeat("b", 64) + "', needs: [cni], crds: skip, chart: nginx, destructive: caches}", want: nil},
		{name: "a chart without a digest", old: feedExample, new: "charts:\n- {name: cni, namespace: kube-system, source: 'file:charts', version: 1.0.0}", want: []FieldError{
			{"charts[0].digest", 0, "is missing", "`constellation config generate` shows an example"},
		}},
		{name: "charts that are no list", old: feedExample, new: "charts: {name: cni}", want: []FieldError{{"charts", line(good, feedExample), "is a group of fields, want a list", "begin each chart with a dash: - name: cert-manager"}}},
		{name: "a chart that needs a later one", old: feedExample, new: "charts:\n- name: cni\n  namespace: kube-system\n  source: http://example.com\n  version: '1'\n  digest: sha256:aa\n  needs: [web]", want: []FieldError{
			{"charts[0].source", line(good, feedExample) + 3, "is not encrypted", "write https://; http is for this computer only"},
			{"charts[0].version", line(good, feedExample) + 4, `"1" is not a version`, "write it as in its Chart.yaml, such as 1.17.4 or v1.19.1"},
			{"charts[0].digest", line(good, feedExample) + 5, `"sha256:aa" is not a digest`, "write sha256: and 64 hex digits: `sha256sum` of the .tgz, or for oci:// the digest that `helm pull` prints"},
			{"charts[0].needs", line(good, feedExample) + 6, "there is no earlier chart web", "name earlier charts only"},
		}},
		{name: "an empty feed", old: feedExample, new: "releases: {feed: ''}", want: feed(`"" is neither a directory nor an address`, "write the path of a directory, or an https address")},
		{name: "a key that is no key", old: feedExample, new: "releases: {feed: ./feed, keys: hello}", want: keys("it contains data that is not PEM")},
		{name: "no key", old: feedExample, new: "releases: {feed: ./feed, keys: ''}", want: keys("it is empty")},
		{name: "a private key", old: feedExample, new: "releases: {feed: ./feed, keys: \"-----BEGIN PRIVATE KEY-----\\nAA==\\n-----END PRIVATE KEY-----\\n\"}", want: keys("it is a private key, want a public one")},
		{name: "a certificate for a key", old: feedExample, new: "releases: {feed: ./feed, keys: \"-----BEGIN CERTIFICATE-----\\nAA==\\n-----END CERTIFICATE-----\\n\"}", want: keys("it is not an ECDSA public key")},
		{name: "feeds that are fine", old: feedExample, new: "releases: {feed: 'http://127.0.0.1:8080/feed', keys: \"" + strings.ReplaceAll(publicKey(t), "\n", "\\n") + "\"}", want: nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			text := strings.ReplaceAll(good, tt.old, tt.new)
			if text == good {
				t.Fatalf("the file has no %q", tt.old)
			}
			_, err := ParseConfig([]byte(text))
			var got []FieldError
			if list, ok := AsConfigErrors(err); ok {
				got = list.Errors
			} else if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("problems (-want +got):\n%s", d)
			}
		})
	}
}

func TestAllProblemsAreReportedAtOnceInOrder(t *testing.T) {
	text := strings.NewReplacer("\nname: demo\n\n", "\nname: DEMO\n\n", "count: 3", "count: many", "image: v1.0.0\n", "", "podCIDR:", "podcidr:").Replace(testConfig(t))
	_, err := ParseConfig([]byte(text))
	list, ok := AsConfigErrors(err)
	if !ok {
		t.Fatal(err)
	}
	var fields []string
	for _, e := range list.Errors {
		fields = append(fields, e.Field)
	}
	if want := []string{"name", "podcidr", "nodeGroups.control-plane.count", "image"}; !cmp.Equal(fields, want) {
		t.Errorf("fields %v, want %v", fields, want)
	}
	if s := err.Error(); !strings.HasPrefix(s, "constellation-conf.yaml has 4 problems\n  line ") || !strings.Contains(s, "(did you mean podCIDR?)") {
		t.Errorf("text:\n%s", s)
	}
}

func TestEmptyAndDoubleFilesAreRefused(t *testing.T) {
	for name, text := range map[string]string{"empty": "", "blank": " \n\n", "comment": "# nothing\n", "two": "version: v2\n---\nversion: v2\n", "list": "- a\n", "huge": strings.Repeat("#", maxFile+1), "text": "hello"} {
		if c, err := ParseConfig([]byte(text)); err == nil {
			t.Errorf("%s: accepted as %+v", name, c)
		} else if _, ok := AsConfigErrors(err); !ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}

const configV1 = `# The first one.
version: v1 # of release v1.0.0
name: old
image: v1.0.0
microserviceVersion: v1.0.0
kubernetesVersion: v1.34.2   # keep


provider: {sandbox: {name: old}}
nodeGroups:
  control-plane: {role: control-plane, initialCount: 1} # one
  workers:
    # two
    initialCount: 2
    role: worker
attestation:
  tpm2:
    measurements:
      # boot loader
      4: "4444444444444444444444444444444444444444444444444444444444444444"  # digits
      11: b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1
      9: {expected: "0909090909090909090909090909090909090909090909090909090909090909", warnOnly: true}
    trustRoots: |
`

func TestMigrateTouchesOnlyWhatChanges(t *testing.T) {
	text := configV1
	for l := range strings.Lines(testRoot(t)) {
		text += "      " + l
	}
	want := strings.NewReplacer(
		"version: v1 #", "version: v2 #",
		"initialCount: 1", "count: 1",
		"initialCount: 2", "count: 2",
		`4: "4444444444444444444444444444444444444444444444444444444444444444"`, `4: {expected: "4444444444444444444444444444444444444444444444444444444444444444", warnOnly: false}`,
		"11: b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1", `11: {expected: "b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1", warnOnly: false}`,
	).Replace(text)
	got, changed, err := MigrateConfig([]byte(text))
	if err != nil || !changed {
		t.Fatalf("changed %t, %v\n%s", changed, err, got)
	}
	if d := cmp.Diff(want, string(got)); d != "" {
		t.Errorf("migrated (-want +got):\n%s", d)
	}
	again, changed, err := MigrateConfig(got)
	if err != nil || changed || string(again) != string(got) {
		t.Errorf("a second time: changed %t, %v", changed, err)
	}
	c, err := ParseConfig(got)
	if err != nil || c.Workers() != 2 || !c.Attestation.TPM2.Measurements[9].WarnOnly || c.Kubernetes.String() != "v1.34.2" {
		t.Errorf("%+v, %v", c, err)
	}
}

func TestMigrateReportsProblemsItCannotRepair(t *testing.T) {
	_, _, err := MigrateConfig([]byte(strings.Replace(configV1, "initialCount: 2", "initialCount: two", 1)))
	list, ok := AsConfigErrors(err)
	if !ok || len(list.Errors) != 2 || list.Errors[0].Field != "nodeGroups.workers.count" || list.Errors[1].Field != "attestation.tpm2.trustRoots" {
		t.Errorf("got %v", err)
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add(configV1)
	f.Add(testConfig(f))
	f.Add("version: v2\nnodeGroups: &a [*a]\n")
	f.Add("a: &a {b: *a}\nattestation: *a\n")
	f.Fuzz(func(t *testing.T, s string) {
		c, err := ParseConfig([]byte(s))
		if err == nil && (c.Name == "" || c.ControlPlanes() < 1 || c.Attestation.TPM2 == nil || c.Kubernetes == (version.Version{})) {
			t.Errorf("accepted %q as %+v", s, c)
		}
		if err != nil {
			if list, ok := AsConfigErrors(err); !ok || len(list.Errors) == 0 {
				t.Errorf("%q gives %v", s, err)
			}
		}
		MigrateConfig([]byte(s))
	})
}

func TestRegistryOfAConfiguration(t *testing.T) {
	w, err := OpenWorkspace(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	file := w.Path("login.json")
	write := func(mode os.FileMode, text string) {
		t.Helper()
		if err := errors.Join(os.WriteFile(file, []byte(text), mode), os.Chmod(file, mode)); err != nil {
			t.Fatal(err)
		}
	}
	c := &RegistryConfig{Address: "registry.example.com/mirror", PullSecret: "login.json"}
	fails := func(want string) {
		t.Helper()
		_, err := w.Registry(c)
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "registry.pullSecret") || strings.Contains(err.Error(), "c2VjcmV0") {
			t.Errorf("error %v, want %q, the field and no secret", err, want)
		}
	}
	fails("no such file")
	write(0o644, `{"auths":{"registry.example.com":{"auth":"c2VjcmV0OnNlY3JldA=="}}}`)
	fails("others can access it")
	write(0o600, `{"auths":{"c2VjcmV0":{}}}`)
	fails("no login for registry.example.com")
	write(0o600, `{"auths":{"registry.example.com":{"auth":"c2VjcmV0OnNlY3JldA=="}}}`)
	if r, err := w.Registry(c); err != nil || r.Username != "secret" || r.Password != "secret" {
		t.Errorf("login %q: %v", r.Username, err)
	}
}
