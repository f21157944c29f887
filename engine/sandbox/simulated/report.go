package simulated

import (
	"crypto/x509/pkix"
	"encoding/json"
	"net/http"
	"os"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// configFile is the kubelet's configuration, which kubeadm writes.
const configFile = "var/lib/kubelet/config.yaml"

// configz reports the kubelet's configuration, as a kubelet does.
func (k *kubelet) configz(w http.ResponseWriter, _ *http.Request) {
	config := map[string]any{}
	b, err := os.ReadFile(k.c.root(configFile))
	if err == nil {
		err = yaml.Unmarshal(b, &config)
	}
	fillIn(config, filledIn())
	k.answer(w, map[string]any{"kubeletconfig": config}, err)
}

// filledIn are fields that kubeadm and kubelets fill in if the file does not have them.
func filledIn() map[string]any {
	return map[string]any{
		"authentication": map[string]any{
			"anonymous": map[string]any{"enabled": false}, "webhook": map[string]any{"enabled": true}, "x509": map[string]any{"clientCAFile": "/etc/kubernetes/pki/ca.crt"},
		},
		"authorization": map[string]any{"mode": "Webhook"}, "streamingConnectionIdleTimeout": "4h0m0s", "makeIPTablesUtilChains": true, "eventRecordQPS": 50,
		"podPidsLimit": -1, "seccompDefault": false,
	}
}

// fillIn sets fields of a configuration that are absent. A duration of zero counts as absent, as for a
// kubelet.
func fillIn(config, defaults map[string]any) {
	for name, v := range defaults {
		below, ok := v.(map[string]any)
		have, is := config[name].(map[string]any)
		switch {
		case ok && is:
			fillIn(have, below)
		case config[name] == nil || config[name] == "" || config[name] == "0s":
			config[name] = v
		}
	}
}

// flagz reports the flags that kubeadm wrote. A kubelet also reports all other flags, with their
// defaults.
func (k *kubelet) flagz(w http.ResponseWriter, _ *http.Request) {
	b, err := os.ReadFile(k.c.root(flagsFile))
	k.answer(w, map[string]any{
		"kind": "Flagz", "apiVersion": "config.k8s.io/v1beta1", "metadata": map[string]any{"name": "kubelet"}, "flags": flagsOf(string(b)),
	}, err)
}

func (k *kubelet) answer(w http.ResponseWriter, v any, err error) {
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(v); err != nil {
		k.log.Debug("kubelet report not sent", "err", err)
	}
}

// mayCall reports whether the owner of a client certificate may call a path of the kubelet.
func mayCall(who pkix.Name, path string) bool {
	if who.CommonName == "kube-apiserver-kubelet-client" {
		return true
	}
	admin := slices.Contains(who.Organization, "system:masters") || slices.Contains(who.Organization, "kubeadm:cluster-admins")
	return admin && (path == "/configz" || path == "/flagz")
}

// flagsOf reads KUBELET_KUBEADM_ARGS of kubeadm's file.
func flagsOf(env string) map[string]string {
	flags := map[string]string{}
	for word := range strings.FieldsSeq(strings.NewReplacer(`"`, " ", "'", " ").Replace(env)) {
		if flag, ok := strings.CutPrefix(word, "--"); ok {
			name, value, _ := strings.Cut(flag, "=")
			flags[name] = value
		}
	}
	return flags
}
