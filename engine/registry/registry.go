// Package registry describes the one registry from which a cluster pulls its images, and how
// references, pods and machines refer to it.
//
// The layout below its address is that of `constellation release mirror`: images of a release by
// their own name, such as operator, and images of Kubernetes below kubernetes. The package reads no
// file and sends no request, and its errors contain no credentials.
package registry

import (
	"bytes"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path"
	"regexp"
	"strconv"
	"strings"
)

// Kubernetes is the folder of the images of Kubernetes below an address.
const Kubernetes = "kubernetes"

// Upstream is the registry of the images of Kubernetes. Machines pull its images from the folder
// [Kubernetes], among them the pause image that containerd starts pods with.
const Upstream = "registry.k8s.io"

// SecretName is the Secret with the address and the login, in each namespace with pods of ours.
const SecretName = "constellation-registry"

// Keys of the Secret beside Kubernetes' own, .dockerconfigjson.
const (
	KeyAddress = "address"
	KeyCA      = "ca.crt"
)

// Limits of what a configuration may have, in bytes.
const (
	maxAddress = 200
	maxBundle  = 64 << 10
	maxLogin   = 4 << 10
)

// Registry is a registry that serves pulls by HTTPS.
type Registry struct {
	// Address is HOST[:PORT][/PATH].
	Address string
	// CABundle are PEM certificates of the authorities that its certificate may be of; empty: those that
	// machines trust.
	CABundle string
	// Username and Password are the login for pulls; both are empty without one.
	Username, Password string
}

var (
	hostRE = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$`)
	pathRE = regexp.MustCompile(`^[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*$`)
)

// BadAddress returns the problem of an address; empty if it is valid.
func BadAddress(s string) (problem, remedy string) {
	const example = "write it as registry.example.com/path"
	if strings.Contains(s, "://") {
		return "has a scheme", "write host and path alone, such as registry.example.com/path: pulls use https"
	}
	host, rest, hasPath := strings.Cut(s, "/")
	name, port, hasPort := strings.Cut(host, ":")
	n, err := strconv.ParseUint(port, 10, 16)
	switch {
	case len(s) > maxAddress:
		return fmt.Sprintf("has %d bytes, limit is %d", len(s), maxAddress), example
	case strings.Contains(s, "@"):
		return "contains credentials or a digest", "name the login in registry.pullSecret"
	case !hostRE.MatchString(name), hasPort && (err != nil || n == 0):
		return fmt.Sprintf("%q does not begin with a host", s), example
	case !hasPort && !strings.Contains(name, "."):
		return fmt.Sprintf("%q has a host without a dot or a port, which container runtimes read as a path of docker.io", s), "write its full name or its port"
	}
	if _, err := netip.ParseAddr(name); err != nil && strings.Trim(name, "0123456789.") == "" {
		return fmt.Sprintf("%q does not begin with a host", s), example
	}
	for part := range strings.SplitSeq(rest, "/") {
		if hasPath && !pathRE.MatchString(part) {
			return fmt.Sprintf("%q has an invalid path", s), "use a-z, 0-9, dots, dashes and underscores between slashes"
		}
	}
	return "", ""
}

// BadBundle returns the problem of a CA bundle; empty if it is valid.
func BadBundle(s string) (problem string) {
	if len(s) > maxBundle {
		return fmt.Sprintf("has %d bytes, limit is %d", len(s), maxBundle)
	}
	rest := []byte(s)
	for n := 0; ; n++ {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			if n == 0 || len(bytes.TrimSpace(rest)) > 0 {
				return "is not a list of PEM certificates"
			}
			return ""
		}
		if block.Type != "CERTIFICATE" {
			return fmt.Sprintf("contains a PEM block of type %q, want CERTIFICATE", block.Type)
		}
		if _, err := x509.ParseCertificate(block.Bytes); err != nil {
			return "contains a malformed certificate"
		}
	}
}

// Validate returns the first problem of r, without its credentials.
func (r Registry) Validate() error {
	if problem, _ := BadAddress(r.Address); problem != "" {
		return fmt.Errorf("address %s", problem)
	}
	if r.CABundle != "" {
		if problem := BadBundle(r.CABundle); problem != "" {
			return fmt.Errorf("CA bundle %s", problem)
		}
	}
	switch {
	case (r.Username == "") != (r.Password == ""):
		return errors.New("login lacks a user name or a password")
	case len(r.Username)+len(r.Password) > maxLogin:
		return fmt.Errorf("login has more than %d bytes", maxLogin)
	case strings.Contains(r.Username, ":"):
		return errors.New("user name contains a colon")
	}
	return nil
}

// Host is the host and port of the address.
func (r Registry) Host() string {
	host, _, _ := strings.Cut(r.Address, "/")
	return host
}

// Image returns the reference of an image of a release in r. ref is the publisher's reference.
func (r Registry) Image(ref string) string {
	return r.Address + "/" + ref[strings.LastIndexByte(ref, '/')+1:]
}

// Repository is kubeadm's imageRepository.
func (r Registry) Repository() string { return r.Address + "/" + Kubernetes }

// auth is the login in the form of basic authentication.
func (r Registry) auth() string {
	return base64.StdEncoding.EncodeToString([]byte(r.Username + ":" + r.Password))
}

// dockerConfig is the part of Docker's config.json that matters here.
type dockerConfig struct {
	Auths map[string]dockerAuth `json:"auths"`
}

type dockerAuth struct {
	Auth          string `json:"auth,omitempty"`
	Username      string `json:"username,omitempty"`
	Password      string `json:"password,omitempty"`
	IdentityToken string `json:"identitytoken,omitempty"`
	RegistryToken string `json:"registrytoken,omitempty"`
}

// DockerConfig returns the content of a Secret of the type kubernetes.io/dockerconfigjson.
func (r Registry) DockerConfig() []byte {
	c := dockerConfig{Auths: map[string]dockerAuth{}}
	if r.Username != "" {
		c.Auths[r.Host()] = dockerAuth{Auth: r.auth()}
	}
	b, err := json.Marshal(c)
	if err != nil { // a map of strings
		panic(fmt.Sprintf("marshal pull secret: %v", err))
	}
	return b
}

// WithLogin returns r with its login in a config.json of Docker. Other logins are ignored. An entry for the address or the
// longest part of it has priority, as in the kubelet.
func (r Registry) WithLogin(config []byte) (Registry, error) {
	var c dockerConfig
	if json.Unmarshal(config, &c) != nil { // the cause may quote the file
		return r, errors.New("it is not a config.json of Docker")
	}
	for at := r.Address; ; at = path.Dir(at) {
		for _, key := range []string{at, "https://" + at, "https://" + at + "/", "https://" + at + "/v2/", "https://" + at + "/v1/"} {
			a, ok := c.Auths[key]
			if !ok {
				continue
			}
			return r.with(key, a)
		}
		if !strings.Contains(at, "/") {
			return r, fmt.Errorf("it has no login for %s in auths", r.Host())
		}
	}
}

// FromSecret is the reverse of [Registry.DockerConfig].
func (r Registry) FromSecret(config []byte) (Registry, error) {
	if string(config) == string(r.DockerConfig()) { // without a login
		return r, r.Validate()
	}
	return r.WithLogin(config)
}

func (r Registry) with(key string, a dockerAuth) (Registry, error) {
	if a.IdentityToken != "" || a.RegistryToken != "" {
		return r, fmt.Errorf("its login for %s is a token, which nodes cannot use; want auth, or username and password", key)
	}
	r.Username, r.Password = a.Username, a.Password
	if a.Auth != "" {
		b, err := base64.StdEncoding.DecodeString(a.Auth)
		user, password, ok := strings.Cut(string(b), ":")
		if err != nil || !ok {
			return r, fmt.Errorf("its auth for %s is not a user name and a password in base64", key)
		}
		r.Username, r.Password = user, password
	}
	if r.Username == "" || r.Password == "" {
		return r, fmt.Errorf("its login for %s is empty; a credential store cannot be read", key)
	}
	if err := r.Validate(); err != nil {
		return r, err
	}
	return r, nil
}

// File is a file of a machine.
type File struct {
	Path string // absolute
	Data []byte
	Mode fs.FileMode
}

// hostsDir is containerd's config_path: a folder per registry.
const hostsDir = "/etc/containerd/certs.d"

// MachineFiles are containerd's settings for the registry: authorities, login, and the registry as the mirror of [Upstream].
// containerd reads them at each pull. A login is sent as basic authentication. There is no fallback to other registries.
func (r Registry) MachineFiles() []File {
	dir := path.Join(hostsDir, r.Host())
	ca := ""
	var files []File
	if r.CABundle != "" {
		ca = path.Join(dir, "ca.crt")
		files = append(files, File{ca, []byte(r.CABundle), 0o644})
	}
	hosts := func(name, server string) {
		var b strings.Builder
		fmt.Fprintf(&b, "server = %q\n\n[host.%[1]q]\n  capabilities = [\"pull\", \"resolve\"]\n  override_path = true\n", server)
		if ca != "" {
			fmt.Fprintf(&b, "  ca = %q\n", ca)
		}
		if r.Username != "" {
			fmt.Fprintf(&b, "  [host.%q.header]\n    Authorization = %q\n", server, "Basic "+r.auth())
		}
		files = append(files, File{path.Join(hostsDir, name, "hosts.toml"), []byte(b.String()), 0o600})
	}
	hosts(r.Host(), "https://"+r.Host()+"/v2")
	if r.Host() != Upstream {
		_, below, _ := strings.Cut(r.Repository(), "/")
		hosts(Upstream, "https://"+r.Host()+"/v2/"+below)
	}
	return files
}
