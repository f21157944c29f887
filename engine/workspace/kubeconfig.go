package workspace

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"net/url"

	"gopkg.in/yaml.v3"
)

// WithServer returns a kubeconfig that leads to endpoint, host:port. It must be a
// kubeconfig with exactly one cluster over https; its credentials are not looked at,
// and no error shows any of it.
func WithServer(kubeconfig []byte, endpoint string) ([]byte, error) {
	doc, server, err := KubeconfigServer(kubeconfig)
	if err != nil {
		return nil, err
	}
	server.SetString("https://" + endpoint)
	var b bytes.Buffer
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	if err := e.Encode(doc); err != nil {
		return nil, errors.New("write kubeconfig: cannot be encoded")
	}
	if err := e.Close(); err != nil {
		return nil, errors.New("write kubeconfig: cannot be encoded")
	}
	return b.Bytes(), nil
}

// LeadsTo reports whether a kubeconfig leads to endpoint, host:port.
func LeadsTo(kubeconfig []byte, endpoint string) bool {
	_, server, err := KubeconfigServer(kubeconfig)
	return err == nil && server.Value == "https://"+endpoint
}

// KubeconfigServer returns a kubeconfig as YAML and its node with the address of the API
// server.
func KubeconfigServer(kubeconfig []byte) (doc, server *yaml.Node, err error) {
	fail := func(problem string) (*yaml.Node, *yaml.Node, error) {
		return nil, nil, fmt.Errorf("read kubeconfig: %s", problem)
	}
	doc = &yaml.Node{}
	if yaml.Unmarshal(kubeconfig, doc) != nil || doc.Kind != yaml.DocumentNode || len(doc.Content) != 1 {
		return fail("it is not YAML")
	}
	top := doc.Content[0]
	clusters, users := find(top, "clusters"), find(top, "users")
	if clusters == nil || clusters.Kind != yaml.SequenceNode || len(clusters.Content) != 1 {
		return fail("it does not name exactly one cluster")
	}
	if users == nil || users.Kind != yaml.SequenceNode || len(users.Content) == 0 {
		return fail("it names no user")
	}
	server = find(find(resolve(clusters.Content[0]), "cluster"), "server")
	if server == nil {
		return fail("it names no server")
	}
	if u, err := url.Parse(server.Value); err != nil || u.Scheme != "https" || u.Host == "" {
		return fail("its server has no https address")
	}
	return doc, server, nil
}

// KubeconfigCA returns the certificate authorities of a kubeconfig with exactly one cluster, as PEM; nil if it
// contains none.
func KubeconfigCA(kubeconfig []byte) []byte {
	doc, _, err := KubeconfigServer(kubeconfig)
	if err != nil {
		return nil
	}
	data := find(find(resolve(find(doc.Content[0], "clusters").Content[0]), "cluster"), "certificate-authority-data")
	if data == nil {
		return nil
	}
	ca, err := base64.StdEncoding.DecodeString(data.Value)
	if err != nil {
		return nil
	}
	return ca
}
