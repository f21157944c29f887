package kubeadm

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path"
	"slices"
	"strconv"

	"gopkg.in/yaml.v3"

	"constellation/engine/version"
)

const apiVersion = "kubeadm.k8s.io/v1beta4"

// SigningDuration is how long certificates live that the controller manager signs, those of kubelets
// above all: 14 days, in Go's notation. It bounds the use of a node's stolen key.
const SigningDuration = "336h0m0s"

// Node is the machine that kubeadm runs on.
type Node struct {
	// Name is that of the Node object.
	Name string
	// ProviderID is what the Node's spec.providerID will hold.
	ProviderID string
	IP         netip.Addr
	// CloudProvider is the kubelet's --cloud-provider; empty: the flag is not set.
	CloudProvider string
}

// Cluster is what kubeadm init makes of its first node.
type Cluster struct {
	Name    string
	Version version.Version
	// EtcdTag is the tag of etcd's image; empty: that of Version.
	EtcdTag string
	// ImageRepository has the images of Kubernetes; empty: kubeadm's default.
	ImageRepository string
	// Endpoint is host:port in front of all API servers.
	Endpoint string
	// PodCIDR is divided among the nodes by the cloud's routes, or by Kubernetes if DividePods is set.
	PodCIDR     netip.Prefix
	DividePods  bool
	ServiceCIDR netip.Prefix
	// CertSANs are names and addresses under which clients reach API servers,
	// beside the endpoint and those that kubeadm adds itself.
	CertSANs []string
	// Off has names of [Items] that are switched off. Unknown names have no effect: a console may know
	// items that this program never switches on.
	Off []string
	// EncryptSecrets is whether API servers encrypt Secrets. Each control plane then needs EncryptionFiles, and a key service.
	EncryptSecrets bool
}

// Join is how a node becomes part of a cluster.
type Join struct {
	ControlPlane bool
	// Endpoint is host:port of the control plane.
	Endpoint string
	// Token is a bootstrap token, CAHash "sha256:<hex>" of the public key of the
	// cluster's CA.
	Token  string
	CAHash string
}

// Config is one configuration file for kubeadm. Its fields are documents; nil ones
// are left out.
type Config struct {
	Init    *InitConfiguration
	Cluster *ClusterConfiguration
	Join    *JoinConfiguration
	Upgrade *UpgradeConfiguration
	Kubelet *KubeletConfiguration
	Proxy   *KubeProxyConfiguration
}

// Kubernetes' own types cannot be imported without all of Kubernetes; what follows
// mirrors the fields that we set, with their names.
type (
	// InitConfiguration is about the first node of a cluster.
	InitConfiguration struct {
		TypeMeta         `yaml:",inline"`
		BootstrapTokens  []BootstrapToken `yaml:"bootstrapTokens"`
		LocalAPIEndpoint APIEndpoint      `yaml:"localAPIEndpoint"`
		NodeRegistration NodeRegistration `yaml:"nodeRegistration"`
		SkipPhases       []string         `yaml:"skipPhases,omitempty"`
		Patches          *Patches         `yaml:"patches,omitempty"`
	}
	// ClusterConfiguration is about the control plane as a whole.
	ClusterConfiguration struct {
		TypeMeta             `yaml:",inline"`
		ClusterName          string       `yaml:"clusterName"`
		KubernetesVersion    string       `yaml:"kubernetesVersion"`
		ControlPlaneEndpoint string       `yaml:"controlPlaneEndpoint"`
		EncryptionAlgorithm  string       `yaml:"encryptionAlgorithm"`
		ImageRepository      string       `yaml:"imageRepository,omitempty"`
		Networking           Networking   `yaml:"networking"`
		Etcd                 *Etcd        `yaml:"etcd,omitempty"`
		APIServer            ControlPlane `yaml:"apiServer"`
		ControllerManager    ControlPlane `yaml:"controllerManager"`
		Scheduler            ControlPlane `yaml:"scheduler"`
	}
	// JoinConfiguration is about a further node.
	JoinConfiguration struct {
		TypeMeta         `yaml:",inline"`
		Discovery        Discovery         `yaml:"discovery"`
		NodeRegistration NodeRegistration  `yaml:"nodeRegistration"`
		ControlPlane     *JoinControlPlane `yaml:"controlPlane,omitempty"`
		Patches          *Patches          `yaml:"patches,omitempty"`
	}
	// KubeletConfiguration is what all kubelets of the cluster share.
	KubeletConfiguration struct {
		TypeMeta     `yaml:",inline"`
		CgroupDriver string `yaml:"cgroupDriver"`
		FailCgroupV1 *bool  `yaml:"failCgroupV1,omitempty"`
		FailSwapOn   bool   `yaml:"failSwapOn"`
		// RotateCertificates is about the certificate that a kubelet is a client with,
		// ServerTLSBootstrap about the one that it serves with.
		RotateCertificates bool `yaml:"rotateCertificates"`
		ServerTLSBootstrap bool `yaml:"serverTLSBootstrap"`
		// Zero values are the defaults of kubelets.
		SeccompDefault  bool     `yaml:"seccompDefault,omitempty"`
		PodPidsLimit    int      `yaml:"podPidsLimit,omitempty"`
		TLSMinVersion   string   `yaml:"tlsMinVersion,omitempty"`
		TLSCipherSuites []string `yaml:"tlsCipherSuites,omitempty"`
	}
	// KubeProxyConfiguration is what all kube-proxies of the cluster share.
	KubeProxyConfiguration struct {
		TypeMeta  `yaml:",inline"`
		Mode      string    `yaml:"mode"`
		Conntrack Conntrack `yaml:"conntrack"`
	}

	// TypeMeta names the kind of a document.
	TypeMeta struct {
		APIVersion string `yaml:"apiVersion"`
		Kind       string `yaml:"kind"`
	}
	// BootstrapToken is a token that init creates.
	BootstrapToken struct {
		Token       string   `yaml:"token"`
		Description string   `yaml:"description"`
		TTL         string   `yaml:"ttl"`
		Usages      []string `yaml:"usages"`
		Groups      []string `yaml:"groups"`
	}
	// APIEndpoint is where this node's API server listens.
	APIEndpoint struct {
		AdvertiseAddress string `yaml:"advertiseAddress"`
		BindPort         int    `yaml:"bindPort"`
	}
	// NodeRegistration is about the kubelet of this node.
	NodeRegistration struct {
		Name                  string   `yaml:"name"`
		CRISocket             string   `yaml:"criSocket"`
		ImagePullPolicy       string   `yaml:"imagePullPolicy"`
		ImagePullSerial       bool     `yaml:"imagePullSerial"`
		IgnorePreflightErrors []string `yaml:"ignorePreflightErrors"`
		KubeletExtraArgs      []Arg    `yaml:"kubeletExtraArgs"`
	}
	// Arg is a flag of a program.
	Arg struct {
		Name  string `yaml:"name"`
		Value string `yaml:"value"`
	}
	// Networking holds the cluster's address ranges.
	Networking struct {
		PodSubnet     string `yaml:"podSubnet"`
		ServiceSubnet string `yaml:"serviceSubnet"`
		DNSDomain     string `yaml:"dnsDomain"`
	}
	// Etcd is about the etcd that kubeadm runs.
	Etcd struct {
		Local LocalEtcd `yaml:"local"`
	}
	// LocalEtcd is about the member on each control plane.
	LocalEtcd struct {
		ImageTag  string `yaml:"imageTag,omitempty"`
		ExtraArgs []Arg  `yaml:"extraArgs,omitempty"`
	}
	// ControlPlane is about one program of the control plane.
	ControlPlane struct {
		ExtraArgs    []Arg       `yaml:"extraArgs,omitempty"`
		ExtraVolumes []HostMount `yaml:"extraVolumes,omitempty"`
		CertSANs     []string    `yaml:"certSANs,omitempty"` // API server only
	}
	// HostMount is a directory of the host in a static pod.
	HostMount struct {
		Name      string `yaml:"name"`
		HostPath  string `yaml:"hostPath"`
		MountPath string `yaml:"mountPath"`
		ReadOnly  bool   `yaml:"readOnly,omitempty"`
		PathType  string `yaml:"pathType"`
	}
	// Discovery is how a joining node finds and trusts the cluster.
	Discovery struct {
		BootstrapToken    TokenDiscovery `yaml:"bootstrapToken"`
		TLSBootstrapToken string         `yaml:"tlsBootstrapToken"`
	}
	// TokenDiscovery trusts the cluster that knows the token and owns the CA.
	TokenDiscovery struct {
		Token             string   `yaml:"token"`
		APIServerEndpoint string   `yaml:"apiServerEndpoint"`
		CACertHashes      []string `yaml:"caCertHashes"`
	}
	// JoinControlPlane says that the node becomes a control plane.
	JoinControlPlane struct {
		LocalAPIEndpoint APIEndpoint `yaml:"localAPIEndpoint"`
	}
	// Conntrack holds limits that kube-proxy would set for the whole kernel.
	Conntrack struct {
		MaxPerCore            int    `yaml:"maxPerCore"`
		Min                   int    `yaml:"min"`
		TCPEstablishedTimeout string `yaml:"tcpEstablishedTimeout"`
		TCPCloseWaitTimeout   string `yaml:"tcpCloseWaitTimeout"`
	}
)

// NewInit returns the configuration with which kubeadm init makes cluster c on
// node n.
func NewInit(c Cluster, n Node) (Config, error) {
	if err := errors.Join(c.check(), n.check()); err != nil {
		return Config{}, fmt.Errorf("configure kubeadm init: %w", err)
	}
	// Without a token of ours kubeadm creates one that is valid for a day, which is not needed.
	token, err := newToken()
	if err != nil {
		return Config{}, err
	}
	h := hardening{c.Off}
	var etcd *Etcd
	if args := h.etcd(); c.EtcdTag != "" || args != nil {
		etcd = &Etcd{LocalEtcd{c.EtcdTag, args}}
	}
	api, mounts := h.apiServer()
	sans := []string{"127.0.0.1", "localhost"}
	for _, s := range c.CertSANs {
		if !slices.Contains(sans, s) {
			sans = append(sans, s)
		}
	}
	config := Config{
		Init: &InitConfiguration{
			TypeMeta: TypeMeta{apiVersion, "InitConfiguration"},
			BootstrapTokens: []BootstrapToken{{
				Token: token, Description: "made by kubeadm init, never used", TTL: "1m0s",
				// Both are demanded; the group that the token's owner would be in has no rights.
				Usages: []string{"signing", "authentication"}, Groups: []string{"system:bootstrappers:nobody"},
			}},
			LocalAPIEndpoint: APIEndpoint{n.IP.String(), 6443},
			NodeRegistration: n.registration(),
			SkipPhases:       []string{"show-join-command"},
		},
		Cluster: &ClusterConfiguration{
			TypeMeta:             TypeMeta{apiVersion, "ClusterConfiguration"},
			ClusterName:          c.Name,
			KubernetesVersion:    c.Version.String(),
			ControlPlaneEndpoint: c.Endpoint,
			EncryptionAlgorithm:  "ECDSA-P256",
			ImageRepository:      c.ImageRepository,
			Networking:           Networking{c.PodCIDR.String(), c.ServiceCIDR.String(), "cluster.local"},
			Etcd:                 etcd,
			APIServer: ControlPlane{
				// Kubelets serve with certificates of the cluster's own authority.
				ExtraArgs:    sortedArgs(append(api, Arg{"kubelet-certificate-authority", PKIDir + "/ca.crt"})...),
				ExtraVolumes: mounts,
				CertSANs:     sans,
			},
			ControllerManager: ControlPlane{ExtraArgs: sortedArgs(append(h.controllerManager(),
				// Where the cloud routes a range to each machine, ranges that Kubernetes would
				// hand out in the order of arrival would name other machines. Without a cloud,
				// network plugins use them.
				Arg{"allocate-node-cidrs", strconv.FormatBool(c.DividePods)},
				// What kubelets are given as clients and servers. They renew it when 70 to 90 %
				// of its life is over; a machine that is off for longer cannot come back.
				Arg{"cluster-signing-duration", SigningDuration},
			)...)},
			Scheduler: ControlPlane{ExtraArgs: sortedArgs(h.flags()...)},
		},
		Kubelet: newKubelet(c.Version, h),
		Proxy: &KubeProxyConfiguration{
			TypeMeta: TypeMeta{"kubeproxy.config.k8s.io/v1alpha1", "KubeProxyConfiguration"},
			Mode:     "nftables",
			// Zero leaves the limits as they are: they belong to the whole kernel,
			// and on machines that are containers this is the host's.
			Conntrack: Conntrack{0, 0, "0s", "0s"},
		},
	}
	if c.EncryptSecrets {
		config.Cluster.APIServer.encryptSecrets()
	}
	return config, nil
}

// encryptSecrets has API servers encrypt as EncryptionFiles say. They also read a changed file while they run.
func (c *ControlPlane) encryptSecrets() {
	c.ExtraArgs = sortedArgs(append(c.ExtraArgs, Arg{"encryption-provider-config", encryptionFile}, Arg{"encryption-provider-config-automatic-reload", "true"})...)
	dir := path.Dir(KMSSocket)
	c.ExtraVolumes = append(c.ExtraVolumes, HostMount{"kms", dir, dir, true, "DirectoryOrCreate"})
}

// NewJoin returns the configuration with which kubeadm join makes node n part of a
// cluster. A control plane needs the cluster's authorities in [PKIDir] beforehand.
func NewJoin(j Join, n Node) (Config, error) {
	errs := []error{n.check()}
	if _, _, err := net.SplitHostPort(j.Endpoint); err != nil {
		errs = append(errs, fmt.Errorf("endpoint %q is not host:port", j.Endpoint))
	}
	if !ValidToken(j.Token) {
		errs = append(errs, errors.New("token is malformed")) // and still a secret
	}
	if err := errors.Join(errs...); err != nil {
		return Config{}, fmt.Errorf("configure kubeadm join: %w", err)
	}
	c := &JoinConfiguration{
		TypeMeta: TypeMeta{apiVersion, "JoinConfiguration"},
		Discovery: Discovery{
			BootstrapToken:    TokenDiscovery{j.Token, j.Endpoint, []string{j.CAHash}},
			TLSBootstrapToken: j.Token,
		},
		NodeRegistration: n.registration(),
	}
	if j.ControlPlane {
		c.ControlPlane = &JoinControlPlane{APIEndpoint{n.IP.String(), 6443}}
	}
	return Config{Join: c}, nil
}

func newKubelet(v version.Version, h hardening) *KubeletConfiguration {
	k := &KubeletConfiguration{
		TypeMeta:     TypeMeta{"kubelet.config.k8s.io/v1beta1", "KubeletConfiguration"},
		CgroupDriver: "systemd",
		// Kubelets renew both certificates when 70 to 90 % of their life is over. No file
		// is configured: a kubelet with tlsCertFile presents that file to callers by
		// address, such as the API server, even after it has renewed its certificate.
		RotateCertificates: true,
		ServerTLSBootstrap: true,
	}
	// From 1.35 on kubelets refuse cgroup v1 unless told otherwise; before, they
	// accept it.
	if v.Major() > 1 || v.Minor() >= 35 {
		k.FailCgroupV1 = new(bool)
	}
	h.kubelet(k)
	return k
}

func (n Node) registration() NodeRegistration {
	args := []Arg{{"node-ip", n.IP.String()}, {"provider-id", n.ProviderID}}
	if n.CloudProvider != "" {
		args = append(args, Arg{"cloud-provider", n.CloudProvider})
	}
	return NodeRegistration{
		Name:            n.Name,
		CRISocket:       criSocket,
		ImagePullPolicy: "IfNotPresent",
		// Kernels of containers and small computers are what these checks are about;
		// both work.
		IgnorePreflightErrors: IgnoredChecks(),
		// Flags, not KubeletConfiguration: kubeadm gives the first node's file to all.
		KubeletExtraArgs: args,
	}
}

func (n Node) check() error {
	var errs []error
	if n.Name == "" {
		errs = append(errs, errors.New("name of the node is empty"))
	}
	if n.ProviderID == "" {
		errs = append(errs, errors.New("provider ID of the node is empty"))
	}
	if !n.IP.IsValid() {
		errs = append(errs, errors.New("address of the node is missing"))
	}
	return errors.Join(errs...)
}

func (c Cluster) check() error {
	var errs []error
	if c.Name == "" {
		errs = append(errs, errors.New("name of the cluster is empty"))
	}
	if c.Version.IsZero() {
		errs = append(errs, errors.New("version of Kubernetes is missing"))
	}
	if _, _, err := net.SplitHostPort(c.Endpoint); err != nil {
		errs = append(errs, fmt.Errorf("endpoint %q is not host:port", c.Endpoint))
	}
	if !c.PodCIDR.IsValid() {
		errs = append(errs, errors.New("pod range is missing"))
	}
	if !c.ServiceCIDR.IsValid() {
		errs = append(errs, errors.New("service range is missing"))
	}
	return errors.Join(errs...)
}

// YAML returns the documents that are set, in a fixed order. It may hold secrets.
func (c Config) YAML() ([]byte, error) {
	var b bytes.Buffer
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	add := func(present bool, doc any) error {
		if !present {
			return nil
		}
		return e.Encode(doc)
	}
	if err := errors.Join(
		add(c.Init != nil, c.Init),
		add(c.Cluster != nil, c.Cluster),
		add(c.Join != nil, c.Join),
		add(c.Upgrade != nil, c.Upgrade),
		add(c.Kubelet != nil, c.Kubelet),
		add(c.Proxy != nil, c.Proxy),
		e.Close(),
	); err != nil {
		return nil, errors.New("write kubeadm configuration") // the cause may quote a token
	}
	return b.Bytes(), nil
}

// secrets returns what must not appear in any output.
func (c Config) secrets() (s []string) {
	if c.Init != nil {
		for _, t := range c.Init.BootstrapTokens {
			s = append(s, t.Token)
		}
	}
	if c.Join != nil {
		s = append(s, c.Join.Discovery.BootstrapToken.Token, c.Join.Discovery.TLSBootstrapToken)
	}
	return s
}

// IgnoredChecks are the checks of kubeadm whose failures are accepted on machines of this
// project, when they join and when they are upgraded.
func IgnoredChecks() []string { return []string{"SystemVerification", "Swap", "Mem", "NumCPU"} }
