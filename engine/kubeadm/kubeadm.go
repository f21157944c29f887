// Package kubeadm runs the kubeadm binary of this host and writes what it reads:
// configuration from typed values, never from templates, so that no input becomes
// syntax.
//
// It hides kubeadm's flags, its API version (v1beta4, Kubernetes 1.34 to 1.36) and
// the ways in which its output can give a secret away: bootstrap tokens and
// certificate keys are taken out of every line and every error, and configuration
// is handed over in a file that only root can read and that is gone afterwards.
//
// The package never decides whether to init, join, upgrade or reset, and never retries.
package kubeadm

import (
	"crypto/rand"
	"fmt"
	"math/big"
	"path"
	"regexp"
)

// Where things are on a node. They are part of the configuration that all nodes of
// a cluster share.
const (
	// DefaultPath is where release data installs kubeadm.
	DefaultPath = "/usr/local/bin/kubeadm"
	// PKIDir is below which kubeadm expects the authorities of the cluster.
	PKIDir = "/etc/kubernetes/pki"
	// AdminKubeconfig is what kubeadm init leaves for the administrator.
	AdminKubeconfig = "/etc/kubernetes/admin.conf"
	// KubeletCertFile and KubeletKeyFile are what every kubelet serves with at first.
	// They must exist before the kubelet starts; "kubeadm reset" removes them. The names
	// are those under which a kubelet that renews its certificate looks for one that it
	// did not ask for itself; renewed ones lie beside them, and come before them.
	KubeletCertFile = "/var/lib/kubelet/pki/kubelet-server.crt"
	KubeletKeyFile  = "/var/lib/kubelet/pki/kubelet-server.key"
	// criSocket is containerd's.
	criSocket = "unix:///run/containerd/containerd.sock"
	// HardeningDir holds the files of ControlPlaneFiles; API servers mount it.
	HardeningDir = "/etc/kubernetes/constellation"
	auditLogDir  = "/var/log/kubernetes/audit"
	// KMSSocket is where API servers that encrypt Secrets have their keys encrypted; they mount its directory.
	KMSSocket      = "/run/constellation-kms/kms.sock"
	encryptionFile = HardeningDir + "/encryption.yaml"
)

var tokenRE = regexp.MustCompile(`^[a-z0-9]{6}\.[a-z0-9]{16}$`)

// ValidToken reports whether s has the form of a bootstrap token.
func ValidToken(s string) bool { return tokenRE.MatchString(s) }

// newToken returns a bootstrap token of 113 random bits.
func newToken() (string, error) {
	const alphabet = "abcdefghijklmnopqrstuvwxyz0123456789"
	b := make([]byte, 0, 23)
	for range 22 {
		i, err := rand.Int(rand.Reader, big.NewInt(int64(len(alphabet))))
		if err != nil {
			return "", fmt.Errorf("make bootstrap token: %w", err)
		}
		b = append(b, alphabet[i.Int64()])
	}
	return string(b[:6]) + "." + string(b[6:]), nil
}

// ControlPlaneFiles returns the files that must exist on a control plane before
// kubeadm init or join runs there, by absolute path: what API servers write to
// their audit log, what they answer to callers without credentials, and the settings of
// admission plugins. They hold no secret. "kubeadm reset" leaves them alone.
func ControlPlaneFiles() map[string][]byte {
	return map[string][]byte{
		HardeningDir + "/audit.yaml":          []byte(auditPolicy),
		HardeningDir + "/authentication.yaml": []byte(authentication),
		AdmissionFile:                         []byte(admission()),
		eventsFile:                            []byte(eventLimits),
	}
}

// Encryption is how API servers store Secrets of a cluster with a key service.
type Encryption string

// Modes of encryption. A ticket and join-config have the first two.
const (
	// Encrypt has Secrets encrypted, and reads those that were stored before.
	Encrypt Encryption = "encrypt"
	// Decrypt stores Secrets as they are, and reads encrypted ones.
	Decrypt Encryption = "read"
	// AwaitKeys stores Secrets as they are: the key service has no keys yet.
	AwaitKeys Encryption = "await-keys"
)

// EncryptionFiles returns further files of a control plane whose API server encrypts Secrets, or will. An unknown mode is Encrypt.
func EncryptionFiles(mode Encryption) map[string][]byte {
	const stored = "      - identity: {}\n"
	providers := keyServiceProvider + stored
	switch mode {
	case Decrypt:
		providers = stored + keyServiceProvider
	case AwaitKeys:
		providers = stored
	}
	return map[string][]byte{encryptionFile: []byte(encryption + providers)}
}

// EncryptionPatch returns a file in PatchesDir, by which kubeadm has the API server of this machine read EncryptionFiles. A cluster that
// encrypts since its init has the same in the configuration that its machines share. That of an older cluster cannot have it: machines
// without the files would have no API server.
func EncryptionPatch() map[string][]byte {
	patch := `[{"op": "add", "path": "/spec/containers/0/command/-", "value": "--encryption-provider-config=` + encryptionFile + `"},
 {"op": "add", "path": "/spec/containers/0/command/-", "value": "--encryption-provider-config-automatic-reload=true"},
 {"op": "add", "path": "/spec/containers/0/volumeMounts/-", "value": {"name": "kms", "mountPath": "` + path.Dir(KMSSocket) + `", "readOnly": true}},
 {"op": "add", "path": "/spec/volumes/-", "value": {"name": "kms", "hostPath": {"path": "` + path.Dir(KMSSocket) + `", "type": "DirectoryOrCreate"}}}]
`
	return map[string][]byte{PatchesDir + "/kube-apiserverconstellation+json.json": []byte(patch)}
}

const encryption = `apiVersion: apiserver.config.k8s.io/v1
kind: EncryptionConfiguration
resources:
  - resources: [secrets]
    providers:
`

// keyServiceProvider has keys encrypted by the key service of the machine. The first provider encrypts, and all decrypt.
const keyServiceProvider = `      - kms:
          apiVersion: v2
          name: constellation
          endpoint: unix://` + KMSSocket + `
          timeout: 3s
`

// auditPolicy records who did what to which object, but no contents, which may be
// secret, and not the renewal of leases and the health checks, which are most of
// the requests and nobody's deeds.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - level: None
    nonResourceURLs: ["/livez*", "/readyz*", "/healthz*"]
  - level: None
    verbs: [get, update, patch]
    resources: [{group: coordination.k8s.io, resources: [leases]}]
  - level: None
    users: ["system:apiserver"]
    verbs: [get, list, watch]
  - level: None
    userGroups: ["system:nodes"]
    verbs: [get, list, watch, update, patch]
    resources: [{group: "", resources: [nodes/status, pods/status, events]}]
  - level: Metadata
`

// authentication lets callers without credentials ask for the server's health, as
// load balancers do, and for the public half of token discovery, as kubeadm join
// does, and for nothing else.
const authentication = `apiVersion: apiserver.config.k8s.io/v1
kind: AuthenticationConfiguration
anonymous:
  enabled: true
  conditions:
    - path: /livez
    - path: /readyz
    - path: /healthz
    - path: /api/v1/namespaces/kube-public/configmaps/cluster-info
`
