package kubeadm

import (
	"errors"
	"fmt"

	"gopkg.in/yaml.v3"
)

// ErrExternalEtcd means that the cluster's etcd is not kubeadm's.
var ErrExternalEtcd = errors.New("etcd is external: kubeadm does not run it")

// EtcdTag returns etcd.local.imageTag of a ClusterConfiguration; empty: kubeadm's own version. The
// error wraps ErrExternalEtcd if kubeadm does not run etcd.
func EtcdTag(config string) (string, error) {
	var c struct {
		Etcd struct {
			Local struct {
				ImageTag string `yaml:"imageTag"`
			} `yaml:"local"`
			External map[string]any `yaml:"external"`
		} `yaml:"etcd"`
	}
	if err := yaml.Unmarshal([]byte(config), &c); err != nil {
		return "", fmt.Errorf("read ClusterConfiguration: %w", err)
	}
	if c.Etcd.External != nil {
		return "", ErrExternalEtcd
	}
	return c.Etcd.Local.ImageTag, nil
}
