package machine

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strconv"
)

// containerdConfig is containerd's configuration (format 2, containerd 1.6 and 1.7).
//
// restrict_oom_score_adj: this computer may not let machines lower the score, and
// runc fails if it tries. privileged_without_host_devices: a privileged pod requests
// all devices, which the machine does not have.
func containerdConfig(pauseImage string) []byte {
	return fmt.Appendf(nil, `version = 2
oom_score = 0

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = %s
  restrict_oom_score_adj = true

  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/etc/cni/net.d"

  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    privileged_without_host_devices = true

    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = true

  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "/etc/containerd/certs.d"
`, strconv.Quote(pauseImage))
}

// registryHosts sends every pull of every registry to the sandbox's registry, without
// a fallback.
func registryHosts() []byte {
	return fmt.Appendf(nil, `server = %q

[host.%q]
  capabilities = ["pull", "resolve"]
`, RegistryMirror, RegistryMirror)
}

// cniList is the machine's pod network. Each pod has a veth pair to the
// machine (ptp), not a bridge: packets between pods of one machine are routed like
// all others, so that a service's replies are translated back on every kernel.
func cniList(podCIDR netip.Prefix) ([]byte, error) {
	list := map[string]any{
		"cniVersion": "0.4.0",
		"name":       "constellation",
		"plugins": []any{
			map[string]any{
				"type": "ptp",
				"ipam": map[string]any{
					"type":   "host-local",
					"ranges": []any{[]any{map[string]any{"subnet": podCIDR.String()}}},
					"routes": []any{map[string]any{"dst": "0.0.0.0/0"}},
				},
			},
			map[string]any{"type": "portmap", "capabilities": map[string]any{"portMappings": true}},
		},
	}
	b, err := json.MarshalIndent(list, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("write CNI list: %w", err)
	}
	return append(b, '\n'), nil
}
