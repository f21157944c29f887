package kubeadm

import (
	"cmp"
	"slices"
	"strings"
)

// Item is a setting of new clusters that the configuration can switch off.
type Item struct {
	// Name is the key below hardening in constellation-conf.yaml.
	Name string
	// Effect is what it changes, Source who demands it: numbers are those of the CIS Kubernetes
	// Benchmark v1.12.0, sections those of the Kubernetes Hardening Guide v1.2 of NSA and CISA.
	Effect, Source string
}

// The names of items.
const (
	itemAnonymous   = "limitAnonymous"
	itemAudit       = "auditLog"
	itemExternalIPs = "denyServiceExternalIPs"
	itemEvents      = "eventRateLimit"
	itemProfiling   = "noProfiling"
	itemPodPids     = "podPidsLimit"
	// ItemNetworkPolicies is not of kubeadm: the chart of the operator has it.
	ItemNetworkPolicies = "networkPolicies"
	// ItemPodSecurity enforces a level of Pod Security.
	ItemPodSecurity = "podSecurity"
	itemSeccomp     = "seccompDefault"
	itemTerminated  = "terminatedPods"
	itemTLS         = "tls"
)

// Items returns all items, in the order of their names.
func Items() []Item {
	return []Item{
		{
			itemAnonymous, "API servers answer callers without credentials on `/livez`, `/readyz`, `/healthz` and the ConfigMap `cluster-info` alone, which `kubeadm join` reads",
			"CIS 1.2.1; NSA/CISA \"Authentication\"",
		},
		{
			itemAudit, "API servers log who did what to which object, without contents: 10 files of 100 MB, for 30 days, in `" + auditLogDir + "`",
			"CIS 1.2.16 to 1.2.19, 3.2.1, 3.2.2; NSA/CISA \"Audit Logging and Threat Detection\"",
		},
		{
			itemExternalIPs, "API servers refuse Services with new `externalIPs`: admission plugin DenyServiceExternalIPs",
			"CIS 1.2.3",
		},
		{
			itemEvents, "API servers limit events: 500 a second each, 100 for one namespace or one user, with bursts of ten times that. Admission plugin EventRateLimit",
			"CIS 1.2.9",
		},
		{
			ItemNetworkPolicies, "NetworkPolicies deny all connections of pods in `constellation-system` and `system-upgrade` but those that they need. They have an effect if the network plugin enforces them",
			"CIS 5.3.2; NSA/CISA \"Network separation and hardening\"",
		},
		{
			itemProfiling, "API server, controller manager and scheduler serve no profiles",
			"CIS 1.2.15, 1.3.2, 1.4.1",
		},
		{
			itemPodPids, "A pod has at most 4,096 processes and threads",
			"CIS 4.2.13; Kubernetes docs, \"Process ID Limits And Reservations\"",
		},
		{
			ItemPodSecurity, "Pods of all namespaces must satisfy the level `baseline`, and those that do not satisfy `restricted` cause a warning and an audit annotation. Exempt: " +
				"`" + strings.Join(ExemptNamespaces(), "`, `") + "`. A label of a namespace sets another level",
			"CIS 5.2.1 to 5.2.13; NSA/CISA \"Pod security enforcement\"",
		},
		{
			itemSeccomp, "Containers without a seccomp profile get that of the container runtime",
			"CIS 4.2.14, 5.6.2; NSA/CISA \"Hardening container environments\"",
		},
		{
			itemTerminated, "The controller manager deletes terminated pods above 1,000",
			"CIS 1.3.1",
		},
		{
			itemTLS, "API server, controller manager, scheduler, etcd and kubelets demand TLS 1.2 or later, and for TLS 1.2 forward secrecy with authenticated encryption",
			"CIS 1.2.29, 4.2.12; NSA/CISA \"Encryption\"",
		},
	}
}

// ItemNames returns the names of all items, in order.
func ItemNames() (names []string) {
	for _, i := range Items() {
		names = append(names, i.Name)
	}
	return names
}

// ExemptNamespaces are namespaces without a level of Pod Security: static pods, network plugins and
// our own services need rights that each level refuses.
func ExemptNamespaces() []string {
	return []string{"kube-system", "constellation-system", "system-upgrade"}
}

// cipherSuites are for TLS 1.2, with forward secrecy and authenticated encryption. Those of TLS 1.3
// cannot be chosen.
var cipherSuites = []string{
	"TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256", "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384", "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
	"TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384", "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
}

const (
	minTLS = "VersionTLS12"
	// podPids bounds fork bombs. Java servers with many threads have some hundred.
	podPids = 4096
)

// hardening are the items of one cluster.
type hardening struct{ off []string }

func (h hardening) on(item string) bool { return !slices.Contains(h.off, item) }

// flags returns those of a program of the control plane.
func (h hardening) flags() (args []Arg) {
	if h.on(itemTLS) {
		args = append(args, Arg{"tls-cipher-suites", strings.Join(cipherSuites, ",")}, Arg{"tls-min-version", minTLS})
	}
	if h.on(itemProfiling) {
		args = append(args, Arg{"profiling", "false"})
	}
	return args
}

// apiServer returns the flags of API servers, and the mounts for them.
func (h hardening) apiServer() (args []Arg, mounts []HostMount) {
	args = h.flags()
	mounts = []HostMount{{"constellation", HardeningDir, HardeningDir, true, "Directory"}}
	if h.on(itemAnonymous) {
		args = append(args, Arg{"authentication-config", HardeningDir + "/authentication.yaml"})
	}
	if h.on(itemAudit) {
		args = append(args,
			Arg{"audit-log-maxage", "30"}, Arg{"audit-log-maxbackup", "10"}, Arg{"audit-log-maxsize", "100"},
			Arg{"audit-log-path", auditLogDir + "/audit.log"}, Arg{"audit-policy-file", HardeningDir + "/audit.yaml"},
		)
		mounts = append(mounts, HostMount{"audit-log", auditLogDir, auditLogDir, false, "DirectoryOrCreate"})
	}
	plugins := []string{"NodeRestriction"} // as kubeadm has it
	if h.on(itemExternalIPs) {
		plugins = append(plugins, "DenyServiceExternalIPs")
	}
	if h.on(itemEvents) {
		plugins = append(plugins, "EventRateLimit")
	}
	if len(plugins) > 1 {
		args = append(args, Arg{"enable-admission-plugins", strings.Join(plugins, ",")})
	}
	// All control planes have both files, so the flag alone chooses, also where a machine joins that knows
	// nothing of the configuration.
	switch {
	case h.on(ItemPodSecurity):
		args = append(args, Arg{"admission-control-config-file", AdmissionFile})
	case h.on(itemEvents):
		args = append(args, Arg{"admission-control-config-file", eventsFile})
	}
	return args, mounts
}

func (h hardening) controllerManager() (args []Arg) {
	args = h.flags()
	if h.on(itemTerminated) {
		args = append(args, Arg{"terminated-pod-gc-threshold", "1000"})
	}
	return args
}

// etcd returns the flags of etcd, which has names of its own for the versions of TLS.
func (h hardening) etcd() []Arg {
	if !h.on(itemTLS) {
		return nil
	}
	return []Arg{{"cipher-suites", strings.Join(cipherSuites, ",")}, {"tls-min-version", "TLS1.2"}}
}

func (h hardening) kubelet(k *KubeletConfiguration) {
	if h.on(itemTLS) {
		k.TLSMinVersion, k.TLSCipherSuites = minTLS, slices.Clone(cipherSuites)
	}
	if h.on(itemPodPids) {
		k.PodPidsLimit = podPids
	}
	k.SeccompDefault = h.on(itemSeccomp)
}

// sortedArgs returns arguments in the order of their names.
func sortedArgs(args ...Arg) []Arg {
	slices.SortStableFunc(args, func(a, b Arg) int { return cmp.Compare(a.Name, b.Name) })
	return args
}

const (
	// AdmissionFile configures admission plugins of API servers: Pod Security, and the limits of events.
	AdmissionFile = HardeningDir + "/admission.yaml"
	// eventsFile is the same without Pod Security.
	eventsFile = HardeningDir + "/admission-events.yaml"
)

const eventLimits = `apiVersion: apiserver.config.k8s.io/v1
kind: AdmissionConfiguration
plugins:
  - name: EventRateLimit
    configuration:
      apiVersion: eventratelimit.admission.k8s.io/v1alpha1
      kind: Configuration
      limits:
        - {type: Server, qps: 500, burst: 5000}
        - {type: Namespace, qps: 100, burst: 1000, cacheSize: 2000}
        - {type: User, qps: 100, burst: 1000, cacheSize: 2000}
`

// admission returns the content of [AdmissionFile].
func admission() string {
	return eventLimits + `  - name: PodSecurity
    configuration:
      apiVersion: pod-security.admission.config.k8s.io/v1
      kind: PodSecurityConfiguration
      defaults: {enforce: baseline, enforce-version: latest, audit: restricted, audit-version: latest, warn: restricted, warn-version: latest}
      exemptions: {namespaces: [` + strings.Join(ExemptNamespaces(), ", ") + `]}
`
}
