package registry

import (
	"encoding/base64"
	"slices"
	"strings"
	"testing"
)

func TestBadAddress(t *testing.T) {
	for _, good := range []string{"registry.example.com", "registry.example.com:5000/a/b-c", "10.42.0.1:5443/mirror", "localhost:5000/a__b"} {
		if problem, _ := BadAddress(good); problem != "" {
			t.Errorf("%s %s", good, problem)
		}
	}
	for bad, want := range map[string]string{
		"":                              "does not begin with a host",
		"https://registry.example.com":  "has a scheme",
		"mirror/path":                   "without a dot or a port",
		"user:x@registry.example.com":   "contains credentials",
		"registry.example.com:0":        "does not begin with a host",
		"registry.example.com:99999/a":  "does not begin with a host",
		"registry.example.com/a//b":     "has an invalid path",
		"registry.example.com/../b":     "has an invalid path",
		"registry.example.com/Upper":    "has an invalid path",
		"999.1.1.1/a":                   "does not begin with a host",
		"a\"]\nserver=x.example.com/b":  "does not begin with a host",
		strings.Repeat("a", 250) + ".b": "limit is 200",
	} {
		if problem, remedy := BadAddress(bad); !strings.Contains(problem, want) || remedy == "" {
			t.Errorf("address %q: problem %q with remedy %q, want %q", bad, problem, remedy, want)
		}
	}
}

func TestReferences(t *testing.T) {
	r := Registry{Address: "registry.example.com:5000/mirror"}
	if got := r.Image("publisher.example/some/operator:v1.1.0@sha256:00"); got != "registry.example.com:5000/mirror/operator:v1.1.0@sha256:00" {
		t.Errorf("image is %s", got)
	}
	if got := r.Repository(); got != "registry.example.com:5000/mirror/kubernetes" {
		t.Errorf("repository is %s", got)
	}
}

func TestWithLogin(t *testing.T) {
	auth := base64.StdEncoding.EncodeToString([]byte("robot:very:secret"))
	r := Registry{Address: "registry.example.com/a/b"}
	for _, config := range []string{
		`{"auths":{"registry.example.com":{"auth":"` + auth + `"},"other.example.com":{"auth":"bm8="}}}`,
		`{"auths":{"https://registry.example.com/v2/":{"username":"robot","password":"very:secret"}}}`,
		`{"auths":{"registry.example.com":{"auth":"bm86bm8="},"registry.example.com/a":{"auth":"` + auth + `"}}}`,
	} {
		got, err := r.WithLogin([]byte(config))
		if err != nil || got.Username != "robot" || got.Password != "very:secret" {
			t.Errorf("login of %s is %q, %q and %v", config, got.Username, got.Password, err)
			continue
		}
		back, err := r.FromSecret(got.DockerConfig())
		if err != nil || back != got {
			t.Errorf("the pull secret of %s does not lead back: %v", config, err)
		}
		if strings.Contains(string(got.DockerConfig()), "other.example.com") {
			t.Error("the pull secret has the login of another registry")
		}
	}
	for config, want := range map[string]string{
		`secret!`: "not a config.json",
		`{"auths":{"other.example.com":{"auth":"c2VjcmV0ITpzZWNyZXQh"}}}`:                                         "no login for registry.example.com",
		`{"auths":{"registry.example.com":{}},"credsStore":"desktop"}`:                                            "a credential store cannot be read",
		`{"auths":{"registry.example.com":{"auth":"secret!"}}}`:                                                   "not a user name and a password",
		`{"auths":{"registry.example.com":{"identitytoken":"secret!"}}}`:                                          "is a token",
		`{"auths":{"registry.example.com":{"username":"a","password":"` + strings.Repeat("secret!", 700) + `"}}}`: "more than 4096 bytes",
	} {
		_, err := r.WithLogin([]byte(config))
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret!") {
			t.Errorf("error %v, want %q without the secret", err, want)
		}
	}
	if got, err := r.FromSecret(r.DockerConfig()); err != nil || got != r {
		t.Errorf("a pull secret without a login: %v", err)
	}
}

func TestMachineFiles(t *testing.T) {
	r := Registry{Address: "registry.example.com:5000/mirror", CABundle: "PEM", Username: "robot", Password: "secret"}
	var paths []string
	for _, f := range r.MachineFiles() {
		paths = append(paths, f.Path)
		hasLogin := strings.Contains(string(f.Data), "Basic cm9ib3Q6c2VjcmV0")
		if hosts := strings.HasSuffix(f.Path, "hosts.toml"); hosts != hasLogin || hosts && f.Mode != 0o600 {
			t.Errorf("%s has mode %o and this content:\n%s", f.Path, f.Mode, f.Data)
		}
		if strings.Contains(f.Path, Upstream) && !strings.Contains(string(f.Data), `[host."https://registry.example.com:5000/v2/mirror/kubernetes"]`) {
			t.Errorf("images of Kubernetes do not come from the mirror:\n%s", f.Data)
		}
	}
	want := []string{
		"/etc/containerd/certs.d/registry.example.com:5000/ca.crt",
		"/etc/containerd/certs.d/registry.example.com:5000/hosts.toml",
		"/etc/containerd/certs.d/registry.k8s.io/hosts.toml",
	}
	if !slices.Equal(paths, want) {
		t.Errorf("files %q, want %q", paths, want)
	}
	if _, err := FromProto(ToProto(Registry{Address: "x\n"})); err == nil {
		t.Error("an invalid registry was accepted")
	}
}
