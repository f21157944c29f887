package benchmark

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"constellation/engine/check"
)

// Components of a control plane.
const (
	apiServer         = "kube-apiserver"
	controllerManager = "kube-controller-manager"
	scheduler         = "kube-scheduler"
	etcd              = "etcd"
)

var components = []string{apiServer, controllerManager, scheduler, etcd}

// typicalFlag is a flag that each component has. A command line without it cannot be read as flags.
var typicalFlag = map[string][]string{
	apiServer: {"etcd-servers"}, controllerManager: {"kubeconfig", "config", "master", "cluster-signing-key-file"}, scheduler: {"kubeconfig", "config", "master"},
	etcd: {"data-dir", "config-file", "name"},
}

// flags are those of a command line. The last one of a name counts.
type flags map[string]string

// parseFlags reads a command line: --name=value, --name value, or --name of a switch.
func parseFlags(args []string) flags {
	out := flags{}
	for i := 0; i < len(args); i++ {
		name, ok := strings.CutPrefix(args[i], "--")
		if !ok {
			if name, ok = strings.CutPrefix(args[i], "-"); !ok {
				continue
			}
		}
		name, value, has := strings.Cut(name, "=")
		if !has {
			value = "true"
			if i+1 < len(args) && !strings.HasPrefix(args[i+1], "-") {
				i++
				value = args[i]
			}
		}
		out[name] = value
	}
	return out
}

// staticPod is a component of a control plane on one node.
type staticPod struct {
	node  string
	flags flags
	// readable is whether the command line has flags as this component has.
	readable bool
}

// want judges the flags of a component, and returns what was seen.
type want func(flags) (seen string, s state)

// show writes a flag: "--profiling=false", or that it is not set.
func (f flags) show(name string) string {
	if v, ok := f[name]; ok {
		return "--" + name + "=" + v
	}
	return "--" + name + " is not set"
}

func (f flags) has(name string) bool { return f[name] != "" }

// list are the values of a flag with commas.
func (f flags) list(name string) []string {
	if f[name] == "" {
		return nil
	}
	return strings.Split(f[name], ",")
}

// isSet wants all of these flags.
func isSet(names ...string) want {
	return func(f flags) (string, state) {
		var seen []string
		ok := true
		for _, n := range names {
			seen, ok = append(seen, f.show(n)), ok && f.has(n)
		}
		return strings.Join(seen, ", "), goodIf(ok)
	}
}

// isNotSet wants that the flag is absent.
func isNotSet(name string) want {
	return func(f flags) (string, state) { return f.show(name), goodIf(!f.has(name)) }
}

// isOneOf wants one of the values. absent is the value without the flag.
func isOneOf(name, absent string, values ...string) want {
	return func(f flags) (string, state) {
		v, set := f[name]
		if !set {
			v = absent
		}
		return f.show(name), goodIf(slices.Contains(values, v))
	}
}

// contains wants a value in a list.
func contains(name, value string) want {
	return func(f flags) (string, state) { return f.show(name), goodIf(slices.Contains(f.list(name), value)) }
}

// lacks wants that a value is not in a list.
func lacks(name, value string) want {
	return func(f flags) (string, state) { return f.show(name), goodIf(!slices.Contains(f.list(name), value)) }
}

// atLeast wants a number.
func atLeast(name string, least int) want {
	return func(f flags) (string, state) {
		n, err := strconv.Atoi(f[name])
		return f.show(name), goodIf(err == nil && n >= least)
	}
}

// unlessFile is w, or hidden if the component reads a file that the API does not show.
func unlessFile(name string, w want) want {
	return func(f flags) (string, state) {
		if f.has(name) {
			return "the file of --" + name + " decides, which the API does not show", hidden
		}
		return w(f)
	}
}

// strongSuites are those that the guides accept. Go names some with a suffix.
var strongSuites = []string{
	"TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256",
	"TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256", "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384", "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305", "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
	"TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384", "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305", "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
}

// strongTLS judges a list of cipher suites. TLS 1.3 has strong ones alone.
func strongTLS(least string, suites []string) (seen string, s state) {
	if least == "VersionTLS13" {
		return "TLS 1.3 is the minimum", good
	}
	if len(suites) == 0 {
		return "no cipher suites are set, and the minimum is not TLS 1.3", bad
	}
	var weak []string
	for _, x := range suites {
		if !slices.Contains(strongSuites, x) {
			weak = append(weak, x)
		}
	}
	if len(weak) > 0 {
		return "weak cipher suites: " + strings.Join(weak, ", "), bad
	}
	return fmt.Sprintf("%d cipher suites, all strong", len(suites)), good
}

// on judges a component on all control planes.
func on(component string, w want) func(*facts) verdict {
	return func(f *facts) verdict {
		if len(f.planes[component]) == 0 {
			return notVisible(f.noPlane(component))
		}
		var t tally
		for _, n := range f.withoutPod(component) {
			t.add(hidden, "no mirror pod of "+component+" in kube-system", "node/"+n)
		}
		for _, p := range f.planes[component] {
			if !p.readable {
				t.add(hidden, "the command line of "+component+" has no flags that this program can read", "node/"+p.node)
				continue
			}
			seen, s := w(p.flags)
			t.add(s, seen, "node/"+p.node)
		}
		return t.verdict("")
	}
}

// withoutPod returns the control planes on which a component has no mirror pod. etcd may run on some of them alone.
func (f *facts) withoutPod(component string) (out []string) {
	for _, n := range f.nodes {
		if n.controlPlane && component != etcd && !slices.ContainsFunc(f.planes[component], func(p staticPod) bool { return p.node == n.name }) {
			out = append(out, n.name)
		}
	}
	return out
}

// noPlane is why a component is not visible.
func (f *facts) noPlane(component string) string {
	if f.distribution.Managed {
		return f.distribution.Title + " runs the control plane: its provider answers for it"
	}
	return "no mirror pod of " + component + " in kube-system: it runs in another way"
}

// ofPlanes are the sources of checks of control planes.
var ofPlanes = []source{sourceNodes, sourcePods}

// flag is a check of the flags of a component.
func flag(number string, level int, component, title, looks, remedy string, w want) item {
	return item{number: number, level: level, title: title, looks: looks + " in the command line of " + component, remedy: remedy, needs: ofPlanes, judge: on(component, w)}
}

// file is a check of a file of a machine.
func file(number, path, what, fix string) item {
	return item{
		number: number, level: 1, title: what, looks: "mode and owner of " + path + " on the machine",
		remedy: fix, command: "stat -c '%a %U:%G %n' " + path,
	}
}

// tree is a check of the files below a folder of a machine. which are the arguments of find that select them.
func tree(number, folder, which, looks, what, fix string) item {
	return item{
		number: number, level: 1, title: what, looks: "mode and owner of " + looks + " on the machine",
		remedy: fix, command: "find " + folder + which + " -exec stat -c '%a %U:%G %n' {} +",
	}
}

// inManifest is the remedy for a flag of a static pod.
func inManifest(component, line string) string {
	return "set " + line + " in /etc/kubernetes/manifests/" + component + ".yaml, and in the ConfigMap kubeadm-config for later nodes"
}

func controlPlaneSections() []section {
	const manifests, conf, pki = "/etc/kubernetes/manifests/", "/etc/kubernetes/", "/etc/kubernetes/pki"
	private := func(number, path, of string) item {
		return file(number, path, "The "+of+" is readable and writable by its owner alone", "chmod 600 "+path)
	}
	root := func(number, path, of string) item {
		return file(number, path, "The "+of+" belongs to root", "chown root:root "+path)
	}
	files := []item{
		private("1.1.1", manifests+"kube-apiserver.yaml", "manifest of the API server"), root("1.1.2", manifests+"kube-apiserver.yaml", "manifest of the API server"),
		private("1.1.3", manifests+"kube-controller-manager.yaml", "manifest of the controller manager"), root("1.1.4", manifests+"kube-controller-manager.yaml", "manifest of the controller manager"),
		private("1.1.5", manifests+"kube-scheduler.yaml", "manifest of the scheduler"), root("1.1.6", manifests+"kube-scheduler.yaml", "manifest of the scheduler"),
		private("1.1.7", manifests+"etcd.yaml", "manifest of etcd"), root("1.1.8", manifests+"etcd.yaml", "manifest of etcd"),
		private("1.1.9", "/etc/cni/net.d/*", "configuration of the network plugin"), root("1.1.10", "/etc/cni/net.d/*", "configuration of the network plugin"),
		file("1.1.11", "/var/lib/etcd", "The data of etcd is accessible to its owner alone", "chmod 700 /var/lib/etcd"),
		file("1.1.12", "/var/lib/etcd", "The data of etcd belongs to the user that runs etcd", "chown etcd:etcd /var/lib/etcd, where etcd runs as that user"),
		private("1.1.13", conf+"admin.conf", "administrator's kubeconfig"), root("1.1.14", conf+"admin.conf", "administrator's kubeconfig"),
		private("1.1.15", conf+"scheduler.conf", "kubeconfig of the scheduler"), root("1.1.16", conf+"scheduler.conf", "kubeconfig of the scheduler"),
		private("1.1.17", conf+"controller-manager.conf", "kubeconfig of the controller manager"), root("1.1.18", conf+"controller-manager.conf", "kubeconfig of the controller manager"),
		tree("1.1.19", pki, "", pki+", with its folders and files,", "Keys and certificates, and their folders, belong to root", "chown -R root:root "+pki),
		tree("1.1.20", pki, " -name '*.crt'", pki+"/*.crt and "+pki+"/etcd/*.crt", "Certificates are writable by root alone", "find "+pki+" -name '*.crt' -exec chmod 644 {} +"),
		tree("1.1.21", pki, " -name '*.key'", pki+"/*.key and "+pki+"/etcd/*.key", "Private keys are readable by root alone", "find "+pki+" -name '*.key' -exec chmod 600 {} +"),
	}
	return []section{
		{"1.1 Files of control planes", files},
		{"1.2 API server", apiServerItems()},
		{"1.3 Controller manager", []item{
			flag("1.3.1", 1, controllerManager, "Terminated pods are deleted above a chosen number", "--terminated-pod-gc-threshold", inManifest(controllerManager, "--terminated-pod-gc-threshold=1000"), atLeast("terminated-pod-gc-threshold", 1)),
			flag("1.3.2", 1, controllerManager, "Profiles of the controller manager are off", "--profiling", inManifest(controllerManager, "--profiling=false"), isOneOf("profiling", "true", "false")),
			flag("1.3.3", 1, controllerManager, "Each controller has an account of its own", "--use-service-account-credentials", inManifest(controllerManager, "--use-service-account-credentials=true"), isOneOf("use-service-account-credentials", "false", "true")),
			flag("1.3.4", 1, controllerManager, "Tokens of accounts are signed with a key of their own", "--service-account-private-key-file", inManifest(controllerManager, "--service-account-private-key-file"), isSet("service-account-private-key-file")),
			flag("1.3.5", 1, controllerManager, "Pods get the authority that they verify the API server with", "--root-ca-file", inManifest(controllerManager, "--root-ca-file"), isSet("root-ca-file")),
			flag("1.3.6", 2, controllerManager, "Serving certificates of kubelets are renewed", "--feature-gates", "remove RotateKubeletServerCertificate=false from --feature-gates", lacks("feature-gates", "RotateKubeletServerCertificate=false")),
			flag("1.3.7", 1, controllerManager, "The controller manager listens on the loopback address alone", "--bind-address", inManifest(controllerManager, "--bind-address=127.0.0.1"), isOneOf("bind-address", "0.0.0.0", "127.0.0.1", "::1")),
		}},
		{"1.4 Scheduler", []item{
			flag("1.4.1", 1, scheduler, "Profiles of the scheduler are off", "--profiling", inManifest(scheduler, "--profiling=false"), unlessFile("config", isOneOf("profiling", "true", "false"))),
			flag("1.4.2", 1, scheduler, "The scheduler listens on the loopback address alone", "--bind-address", inManifest(scheduler, "--bind-address=127.0.0.1"), isOneOf("bind-address", "0.0.0.0", "127.0.0.1", "::1")),
		}},
	}
}

func apiServerItems() []item {
	api := func(number, title, looks, remedy string, w want) item {
		return flag(number, 1, apiServer, title, looks, remedy, w)
	}
	plugin := func(name string) string { return inManifest(apiServer, "--enable-admission-plugins=…,"+name) }
	anonymous := item{
		number: "1.2.1", nsa: guideAccess, level: 1, title: "Requests without credentials are refused",
		looks:  "answers of the API server to requests without credentials for /api, and for /livez",
		remedy: inManifest(apiServer, "--anonymous-auth=false") + ", or allow anonymous requests for health checks alone with --authentication-config",
		needs:  []source{sourceAnonymous}, judge: anonymousRequests,
	}
	return nsaOf(map[string]string{
		"1.2.2": guideAccess, "1.2.6": guideAccess, "1.2.7": guideAccess, "1.2.8": guideAccess, "1.2.5": guideNetwork, "1.2.23": guideNetwork, "1.2.24": guideNetwork, "1.2.26": guideNetwork,
		"1.2.27": guideNetwork, "1.2.29": guideNetwork, "1.2.16": guideAudit, "1.2.17": guideAudit, "1.2.18": guideAudit, "1.2.19": guideAudit,
	}, []item{
		anonymous,
		api("1.2.2", "No file with fixed tokens is used", "--token-auth-file", "remove --token-auth-file from the manifest, and give its users another way to log in", isNotSet("token-auth-file")),
		api("1.2.3", "Services cannot claim external addresses", "--enable-admission-plugins", plugin("DenyServiceExternalIPs"), contains("enable-admission-plugins", "DenyServiceExternalIPs")),
		api("1.2.4", "The API server has a client certificate for kubelets", "--kubelet-client-certificate and --kubelet-client-key", inManifest(apiServer, "both flags"), isSet("kubelet-client-certificate", "kubelet-client-key")),
		api("1.2.5", "The API server verifies certificates of kubelets", "--kubelet-certificate-authority", inManifest(apiServer, "--kubelet-certificate-authority")+"; kubelets then need serverTLSBootstrap", isSet("kubelet-certificate-authority")),
		api("1.2.6", "Requests need authorization", "--authorization-mode", inManifest(apiServer, "--authorization-mode=Node,RBAC"), unlessFile("authorization-config", both(isSet("authorization-mode"), lacks("authorization-mode", "AlwaysAllow")))),
		api("1.2.7", "Kubelets may access objects of their own node alone", "--authorization-mode", inManifest(apiServer, "--authorization-mode=Node,RBAC"), unlessFile("authorization-config", contains("authorization-mode", "Node"))),
		api("1.2.8", "Roles decide about requests", "--authorization-mode", inManifest(apiServer, "--authorization-mode=Node,RBAC"), unlessFile("authorization-config", contains("authorization-mode", "RBAC"))),
		api("1.2.9", "Events are limited in number", "--enable-admission-plugins", plugin("EventRateLimit")+", with a file in --admission-control-config-file", contains("enable-admission-plugins", "EventRateLimit")),
		api("1.2.10", "No plugin admits everything", "--enable-admission-plugins", "remove AlwaysAdmit from --enable-admission-plugins", lacks("enable-admission-plugins", "AlwaysAdmit")),
		api("1.2.11", "Images are pulled for each pod, with the pod's own credentials", "--enable-admission-plugins", plugin("AlwaysPullImages"), contains("enable-admission-plugins", "AlwaysPullImages")),
		api("1.2.12", "Pods get accounts by the plugin ServiceAccount", "--disable-admission-plugins", "remove ServiceAccount from --disable-admission-plugins", lacks("disable-admission-plugins", "ServiceAccount")),
		api("1.2.13", "Nothing is created in a namespace that is being deleted", "--disable-admission-plugins", "remove NamespaceLifecycle from --disable-admission-plugins", lacks("disable-admission-plugins", "NamespaceLifecycle")),
		api("1.2.14", "Kubelets may change their own node and its pods alone", "--enable-admission-plugins", plugin("NodeRestriction"), contains("enable-admission-plugins", "NodeRestriction")),
		api("1.2.15", "Profiles of the API server are off", "--profiling", inManifest(apiServer, "--profiling=false"), isOneOf("profiling", "true", "false")),
		api("1.2.16", "Requests are written to an audit log", "--audit-log-path", inManifest(apiServer, "--audit-log-path and --audit-policy-file"), isSet("audit-log-path")),
		api("1.2.17", "Audit logs are kept for 30 days or more", "--audit-log-maxage", inManifest(apiServer, "--audit-log-maxage=30"), atLeast("audit-log-maxage", 30)),
		api("1.2.18", "Ten or more older audit logs are kept", "--audit-log-maxbackup", inManifest(apiServer, "--audit-log-maxbackup=10"), atLeast("audit-log-maxbackup", 10)),
		api("1.2.19", "An audit log may grow to 100 MB or more before the next begins", "--audit-log-maxsize", inManifest(apiServer, "--audit-log-maxsize=100"), atLeast("audit-log-maxsize", 100)),
		api("1.2.20", "A request ends after five minutes at most", "--request-timeout", "remove --request-timeout, or set at most 300s", shortRequests),
		api("1.2.21", "Tokens of deleted accounts are refused", "--service-account-lookup", "remove --service-account-lookup=false", isOneOf("service-account-lookup", "true", "true")),
		api("1.2.22", "Tokens of accounts are verified with a key of their own", "--service-account-key-file", inManifest(apiServer, "--service-account-key-file"), isSet("service-account-key-file")),
		api("1.2.23", "The API server has a client certificate for etcd", "--etcd-certfile and --etcd-keyfile", inManifest(apiServer, "both flags"), isSet("etcd-certfile", "etcd-keyfile")),
		api("1.2.24", "The API server serves with a certificate that was given to it", "--tls-cert-file and --tls-private-key-file", inManifest(apiServer, "both flags"), isSet("tls-cert-file", "tls-private-key-file")),
		api("1.2.25", "Client certificates are verified with an authority", "--client-ca-file", inManifest(apiServer, "--client-ca-file"), isSet("client-ca-file")),
		api("1.2.26", "The API server verifies certificates of etcd", "--etcd-cafile", inManifest(apiServer, "--etcd-cafile"), isSet("etcd-cafile")),
		api("1.2.27", "Encryption of Secrets in etcd is configured", "--encryption-provider-config", inManifest(apiServer, "--encryption-provider-config"), isSet("encryption-provider-config")),
		{
			number: "1.2.28", level: 1, manual: true, title: "The first provider of encryption is kms, secretbox or aescbc", looks: "--encryption-provider-config in the command line of kube-apiserver; the API does not show the file",
			remedy: "name kms, secretbox or aescbc first, and write all Secrets again", command: "grep -A1 providers: FILE # on a control plane, with the file of --encryption-provider-config",
			needs: ofPlanes, judge: encryptionFile,
		},
		api("1.2.29", "TLS connections to the API server use strong ciphers", "--tls-min-version and --tls-cipher-suites", inManifest(apiServer, "--tls-min-version=VersionTLS13"), func(f flags) (string, state) {
			return strongTLS(f["tls-min-version"], f.list("tls-cipher-suites"))
		}),
		api("1.2.30", "Tokens of accounts are refused after their expiration", "--service-account-extend-token-expiration", inManifest(apiServer, "--service-account-extend-token-expiration=false"), isOneOf("service-account-extend-token-expiration", "true", "false")),
	})
}

// nsaOf adds the parts of the NSA/CISA guide to checks, by number.
func nsaOf(parts map[string]string, items []item) []item {
	for i := range items {
		if p := parts[items[i].number]; p != "" {
			items[i].nsa = p
		}
	}
	return items
}

// both wants two things.
func both(a, b want) want {
	return func(f flags) (string, state) {
		if seen, s := a(f); s != good {
			return seen, s
		}
		return b(f)
	}
}

// shortRequests wants that requests are bounded by five minutes.
func shortRequests(f flags) (string, state) {
	const name, most = "request-timeout", 5 * time.Minute
	if !f.has(name) {
		return "--" + name + " is not set: one minute", good
	}
	d, err := time.ParseDuration(f[name])
	return f.show(name), goodIf(err == nil && d > 0 && d <= most)
}

// encryptionFile shows where encryption is configured.
func encryptionFile(f *facts) verdict {
	const name = "encryption-provider-config"
	v := on(apiServer, isSet(name))(f)
	if v.status == check.SecurityFailed {
		return notApplicable("no encryption is configured: see cis-1.2.27")
	}
	return v
}

// anonymousRequests judges the answers to requests without credentials.
func anonymousRequests(f *facts) verdict {
	var t tally
	for _, path := range anonymousPaths {
		code := f.anonymous[path]
		switch {
		case code == 0:
			t.add(hidden, "no answer to a request without credentials for "+path, "")
		case code == 401:
			t.add(good, fmt.Sprintf("%s without credentials: refused (401)", path), "")
		case path == healthPath:
			t.add(good, fmt.Sprintf("%s without credentials: answered (%d), which probes of load balancers need", path, code), "")
		default:
			t.add(bad, fmt.Sprintf("%s without credentials: taken as the user system:anonymous (%d)", path, code), "")
		}
	}
	return t.verdict("")
}

func etcdSections() []section {
	of := func(number, title, looks, line string, w want) item {
		c := flag(number, 1, etcd, title, looks, inManifest(etcd, line), unlessFile("config-file", w))
		c.nsa = guideNetwork
		return c
	}
	return []section{{"2 etcd", []item{
		of("2.1", "etcd serves with a certificate", "--cert-file and --key-file", "both flags", isSet("cert-file", "key-file")),
		of("2.2", "Clients of etcd need a certificate", "--client-cert-auth", "--client-cert-auth=true", isOneOf("client-cert-auth", "false", "true")),
		of("2.3", "etcd does not serve with a self-signed certificate", "--auto-tls", "--auto-tls=false", isOneOf("auto-tls", "false", "false")),
		of("2.4", "Members of etcd have certificates for each other", "--peer-cert-file and --peer-key-file", "both flags", isSet("peer-cert-file", "peer-key-file")),
		of("2.5", "Members of etcd verify each other's certificates", "--peer-client-cert-auth", "--peer-client-cert-auth=true", isOneOf("peer-client-cert-auth", "false", "true")),
		of("2.6", "Members of etcd do not use self-signed certificates for each other", "--peer-auto-tls", "--peer-auto-tls=false", isOneOf("peer-auto-tls", "false", "false")),
		{
			number: "2.7", level: 2, nsa: guideNetwork, title: "etcd trusts an authority of its own, not that of the cluster", looks: "--trusted-ca-file of etcd and --client-ca-file of kube-apiserver: the files differ by path",
			remedy: "make an authority for etcd alone, and name its file in --trusted-ca-file", needs: ofPlanes, judge: ownAuthority,
		},
	}}}
}

// ownAuthority compares the authorities of etcd and of the cluster.
func ownAuthority(f *facts) verdict {
	clients := map[string]bool{}
	for _, p := range f.planes[apiServer] {
		if p.readable {
			clients[p.flags["client-ca-file"]] = true
		}
	}
	if len(clients) == 0 {
		return notVisible(f.noPlane(apiServer))
	}
	return on(etcd, unlessFile("config-file", func(fl flags) (string, state) {
		return fl.show("trusted-ca-file"), goodIf(fl.has("trusted-ca-file") && !clients[fl["trusted-ca-file"]])
	}))(f)
}

func configurationSections() []section {
	users := func(number, what, how, command string) item {
		return item{
			number: number, nsa: guideAccess, level: 1, manual: true, title: "People do not log in with " + what, looks: "nothing: credentials that people hold are not visible", remedy: how, command: command,
		}
	}
	const oidc = "let people log in through OpenID Connect: --authentication-config with a JWT authenticator"
	return []section{
		{"3.1 Authentication of users", []item{
			users("3.1.1", "client certificates, which cannot be revoked", oidc, "kubectl get certificatesigningrequests -o wide"),
			users("3.1.2", "tokens of ServiceAccounts", oidc, "kubectl get secrets --all-namespaces --field-selector type=kubernetes.io/service-account-token"),
			users("3.1.3", "bootstrap tokens", oidc, "kubectl -n kube-system get secrets --field-selector type=bootstrap.kubernetes.io/token"),
		}},
		{"3.2 Logging", []item{
			{
				number: "3.2.1", nsa: guideAudit, level: 1, title: "An audit policy selects the requests that are logged", looks: "--audit-policy-file in the command line of kube-apiserver", remedy: inManifest(apiServer, "--audit-policy-file"),
				needs: ofPlanes, judge: on(apiServer, isSet("audit-policy-file")),
			},
			{
				number: "3.2.2", nsa: guideAudit, level: 2, manual: true, title: "The audit policy covers Secrets, workloads, and exec, port-forward and proxy", looks: "--audit-policy-file in the command line of kube-apiserver; the API does not show the file",
				remedy: "log at least metadata of these requests, and no content of Secrets", command: "cat FILE # on a control plane, with the file of --audit-policy-file",
				needs: ofPlanes, judge: on(apiServer, isSet("audit-policy-file")),
			},
		}},
	}
}
