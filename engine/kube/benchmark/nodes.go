package benchmark

import (
	"fmt"
	"net/netip"
	"strings"

	"sigs.k8s.io/yaml"

	"constellation/engine/check"
)

// kubelet is what a kubelet reports.
type kubelet struct {
	node string
	// config is its configuration with what flags and drop-in files change; nil: why is the reason.
	config map[string]any
	// flags are nil if the kubelet does not report them.
	flags map[string]string
	why   string
}

// field returns a field of a configuration; nil if it is absent.
func field(config map[string]any, path ...string) any {
	var v any = config
	for _, name := range path {
		m, ok := v.(map[string]any)
		if !ok {
			return nil
		}
		v = m[name]
	}
	return v
}

// showField writes a field: "readOnlyPort: 0".
func showField(config map[string]any, path ...string) string {
	v := field(config, path...)
	if v == nil || v == "" {
		return strings.Join(path, ".") + " is not set"
	}
	return fmt.Sprintf("%s: %v", strings.Join(path, "."), v)
}

// wantConfig judges a kubelet, and returns what was seen.
type wantConfig func(kubelet) (seen string, s state)

// fieldIs wants one of the values, as text. Absent fields are "".
func fieldIs(path string, values ...string) wantConfig {
	return func(k kubelet) (string, state) {
		p := strings.Split(path, ".")
		v := ""
		if x := field(k.config, p...); x != nil {
			v = fmt.Sprint(x)
		}
		for _, want := range values {
			if v == want {
				return showField(k.config, p...), good
			}
		}
		return showField(k.config, p...), bad
	}
}

// fieldIsNot wants any other value.
func fieldIsNot(path string, values ...string) wantConfig {
	is := fieldIs(path, values...)
	return func(k kubelet) (string, state) {
		seen, s := is(k)
		return seen, goodIf(s == bad)
	}
}

// onKubelets judges all kubelets.
func onKubelets(w wantConfig) func(*facts) verdict {
	return func(f *facts) verdict {
		if len(f.kubelets) == 0 {
			return notApplicable("the cluster has no nodes")
		}
		var t tally
		for _, k := range f.kubelets {
			if k.config == nil {
				t.add(hidden, k.why, "node/"+k.node)
				continue
			}
			seen, s := w(k)
			t.add(s, seen, "node/"+k.node)
		}
		return t.verdict("")
	}
}

func nodeSections() []section {
	private := func(number, path, of string) item {
		return file(number, path, "The "+of+" is readable and writable by its owner alone", "chmod 600 "+path)
	}
	root := func(number, path, of string) item {
		return file(number, path, "The "+of+" belongs to root", "chown root:root "+path)
	}
	of := func(number string, level int, title, looks, line string, w wantConfig) item {
		return item{
			number: number, level: level, title: title, looks: looks + " in the configuration that each kubelet reports", needs: []source{sourceNodes, sourceKubelets}, judge: onKubelets(w),
			remedy: "set " + line + " in /var/lib/kubelet/config.yaml of the nodes and in the ConfigMap kubelet-config, and restart the kubelet",
		}
	}
	const unit = "/etc/systemd/system/kubelet.service.d/10-kubeadm.conf"
	return []section{
		{"4.1 Files of nodes", []item{
			private("4.1.1", unit, "unit of the kubelet"), root("4.1.2", unit, "unit of the kubelet"),
			private("4.1.3", "/var/lib/kube-proxy/kubeconfig.conf", "kubeconfig of kube-proxy"), root("4.1.4", "/var/lib/kube-proxy/kubeconfig.conf", "kubeconfig of kube-proxy"),
			private("4.1.5", "/etc/kubernetes/kubelet.conf", "kubeconfig of the kubelet"), root("4.1.6", "/etc/kubernetes/kubelet.conf", "kubeconfig of the kubelet"),
			file("4.1.7", "/etc/kubernetes/pki/ca.crt", "The certificate of the cluster's authority is writable by root alone", "chmod 644 /etc/kubernetes/pki/ca.crt, or a stricter mode"),
			root("4.1.8", "/etc/kubernetes/pki/ca.crt", "certificate of the cluster's authority"),
			private("4.1.9", "/var/lib/kubelet/config.yaml", "configuration of the kubelet"), root("4.1.10", "/var/lib/kubelet/config.yaml", "configuration of the kubelet"),
		}},
		{"4.2 Kubelet", nsaOf(map[string]string{"4.2.1": guideAccess, "4.2.2": guideAccess, "4.2.4": guideNetwork, "4.2.14": guidePods}, []item{
			of("4.2.1", 1, "Kubelets refuse requests without credentials", "authentication.anonymous.enabled", "authentication.anonymous.enabled: false", fieldIs("authentication.anonymous.enabled", "false")),
			of("4.2.2", 1, "Kubelets authorize requests through the API server", "authorization.mode", "authorization.mode: Webhook", fieldIs("authorization.mode", "Webhook")),
			of("4.2.3", 1, "Kubelets verify client certificates with an authority", "authentication.x509.clientCAFile", "authentication.x509.clientCAFile", fieldIsNot("authentication.x509.clientCAFile", "")),
			of("4.2.4", 1, "Kubelets have no port without authentication", "readOnlyPort", "readOnlyPort: 0", fieldIs("readOnlyPort", "", "0")),
			of("4.2.5", 1, "Idle connections into pods end", "streamingConnectionIdleTimeout", "streamingConnectionIdleTimeout: 4h0m0s", fieldIsNot("streamingConnectionIdleTimeout", "0", "0s")),
			of("4.2.6", 1, "Kubelets may manage the chains of iptables that they need", "makeIPTablesUtilChains", "makeIPTablesUtilChains: true", fieldIs("makeIPTablesUtilChains", "", "true")),
			of("4.2.7", 1, "Nodes have the names of their machines", "--hostname-override, for kubelets that report flags", "no --hostname-override", hostname),
			of("4.2.8", 2, "Kubelets may send enough events", "eventRecordQPS", "eventRecordQPS: 50", fieldIsNot("eventRecordQPS", "")),
			of("4.2.9", 1, "Kubelets serve with a certificate of the cluster's authority or of yours", "serverTLSBootstrap, or tlsCertFile and tlsPrivateKeyFile", "serverTLSBootstrap: true", servingCertificate),
			of("4.2.10", 1, "Kubelets renew their client certificates", "rotateCertificates", "rotateCertificates: true", fieldIs("rotateCertificates", "true")),
			of("4.2.11", 1, "Kubelets renew their serving certificates", "serverTLSBootstrap and the feature gate RotateKubeletServerCertificate", "serverTLSBootstrap: true", renewedServing),
			of("4.2.12", 1, "TLS connections to kubelets use strong ciphers", "tlsMinVersion and tlsCipherSuites", "tlsMinVersion: VersionTLS13", kubeletTLS),
			of("4.2.13", 1, "The processes of a pod are limited in number", "podPidsLimit", "podPidsLimit: 4096", fieldIsNot("podPidsLimit", "", "-1", "0")),
			of("4.2.14", 1, "Pods without a seccomp profile get that of the runtime", "seccompDefault", "seccompDefault: true", fieldIs("seccompDefault", "true")),
		})},
		{"4.3 kube-proxy", []item{{
			number: "4.3.1", level: 1, title: "kube-proxy serves metrics on the loopback address alone", looks: "metricsBindAddress in the ConfigMap kube-system/kube-proxy",
			remedy: "remove metricsBindAddress from the ConfigMap, and restart kube-proxy", command: "kubectl -n kube-system get configmap kube-proxy -o yaml",
			needs: []source{sourceProxy}, judge: proxyMetrics,
		}}},
	}
}

func hostname(k kubelet) (string, state) {
	if k.flags == nil {
		return "the kubelet does not report its flags (feature gate ComponentFlagz)", hidden
	}
	f := flags(k.flags)
	if f.has("hostname-override") {
		return "--hostname-override is set", bad // the value differs on each node
	}
	return f.show("hostname-override"), good
}

func servingCertificate(k kubelet) (string, state) {
	if seen, s := fieldIs("serverTLSBootstrap", "true")(k); s == good {
		return seen, s
	}
	cert, key := field(k.config, "tlsCertFile"), field(k.config, "tlsPrivateKeyFile")
	own := cert != nil && cert != "" && key != nil && key != ""
	// Without both settings a kubelet writes the certificate that it made itself to this file.
	if own && !strings.HasPrefix(fmt.Sprint(cert), "/var/lib/kubelet/pki/") {
		return showField(k.config, "tlsCertFile"), good
	}
	return "a self-signed certificate of the kubelet: serverTLSBootstrap is not set", bad
}

func renewedServing(k kubelet) (string, state) {
	if seen, s := fieldIsNot("featureGates.RotateKubeletServerCertificate", "false")(k); s == bad {
		return seen, s
	}
	if seen, s := fieldIs("serverTLSBootstrap", "true")(k); s == good {
		return seen, s
	}
	return "serverTLSBootstrap is not set: nothing renews the serving certificate", bad
}

func kubeletTLS(k kubelet) (string, state) {
	var suites []string
	if list, ok := field(k.config, "tlsCipherSuites").([]any); ok {
		for _, x := range list {
			suites = append(suites, fmt.Sprint(x))
		}
	}
	least, _ := field(k.config, "tlsMinVersion").(string)
	return strongTLS(least, suites)
}

// proxyMetrics judges the address of kube-proxy's metrics.
func proxyMetrics(f *facts) verdict {
	switch {
	case f.proxyConfig == nil:
		return notApplicable("there is no ConfigMap kube-system/kube-proxy: something else forwards traffic of Services")
	case *f.proxyConfig == "":
		return notVisible("the ConfigMap kube-system/kube-proxy has no config.conf")
	}
	var c struct {
		Address string `json:"metricsBindAddress"`
	}
	if err := yaml.Unmarshal([]byte(*f.proxyConfig), &c); err != nil {
		return notVisible("the ConfigMap kube-system/kube-proxy cannot be read as YAML")
	}
	e := check.Evidence{Text: "metricsBindAddress: " + c.Address}
	if c.Address == "" {
		e.Text = "metricsBindAddress is not set: 127.0.0.1:10249"
		return verdict{status: check.SecurityPassed, evidence: []check.Evidence{e}}
	}
	ok := strings.HasPrefix(c.Address, "localhost:")
	if a, err := netip.ParseAddrPort(c.Address); err == nil {
		ok = a.Addr().IsLoopback()
	}
	if !ok {
		e.Wrong = true
		return verdict{status: check.SecurityFailed, evidence: []check.Evidence{e}}
	}
	return verdict{status: check.SecurityPassed, evidence: []check.Evidence{e}}
}
