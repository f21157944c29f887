package machinecheck

import (
	"slices"
	"strings"

	"github.com/BurntSushi/toml"

	"constellation/engine/plan"
	"constellation/engine/sshhost"
	"constellation/engine/words"
)

// Containerd are settings of /etc/containerd/config.toml that a node needs.
type Containerd struct {
	// Source is where they are from: package if the file is that of Debian's package, which has none of them;
	// containerd if it printed its complete configuration; file if there is no containerd yet; unread.
	Source string `json:"source"`
	// CRI is whether containerd serves the kubelet.
	CRI bool `json:"cri"`
	// Runtime is the default runtime, SystemdCgroup whether it uses the control groups of systemd.
	Runtime       string `json:"runtime,omitempty"`
	SystemdCgroup bool   `json:"systemdCgroup"`
	// PluginFolders are where it finds network plugins.
	PluginFolders []string `json:"pluginFolders,omitempty"`
}

// Values of Containerd.Source.
const (
	containerdPackage = "package"
	containerdDumped  = "containerd"
	containerdFile    = "file"
)

// pluginFolder is where network plugins install themselves.
const pluginFolder = "/opt/cni/bin"

// containerdConfig is a configuration of containerd, as far as a node needs it. The lines of the script have no other
// settings.
type containerdConfig struct {
	Disabled []string           `toml:"disabled_plugins"`
	Imports  []string           `toml:"imports"`
	Plugins  map[string]criPart `toml:"plugins"`
}

// criPart is the configuration of a CRI plugin.
type criPart struct {
	SystemdCgroup bool `toml:"systemd_cgroup"` // of version 1 alone
	CNI           struct {
		Folder  *string  `toml:"bin_dir"`
		Folders []string `toml:"bin_dirs"`
	} `toml:"cni"`
	Containerd struct {
		Default  string `toml:"default_runtime_name"`
		Runtimes map[string]struct {
			Options struct{ SystemdCgroup bool }
		} `toml:"runtimes"`
	} `toml:"containerd"`
}

// criPlugins are the names of the plugin in the versions 3, 2 and 1 of the configuration.
var criPlugins = []string{"io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "cri"}

// containerd completes the facts with the lines of the configuration.
func (p *parser) containerd() {
	c := p.Containerd
	if c == nil || c.Source != containerdDumped && c.Source != containerdFile {
		return
	}
	var config containerdConfig
	if _, err := toml.Decode(strings.Join(p.config, "\n"), &config); err != nil || c.Source == containerdFile && len(config.Imports) > 0 {
		c.Source = string(Unread)
		return
	}
	var part criPart
	version := ""
	for _, name := range slices.Backward(criPlugins) {
		if x, ok := config.Plugins[name]; ok {
			part, version = x, name
		}
	}
	c.CRI = !slices.ContainsFunc(config.Disabled, func(name string) bool { return slices.Contains(criPlugins, name) })
	c.Runtime = part.Containerd.Default
	if c.Runtime == "" {
		c.Runtime = "runc"
	}
	c.SystemdCgroup = part.SystemdCgroup && version == "cri" || part.Containerd.Runtimes[c.Runtime].Options.SystemdCgroup
	c.PluginFolders = part.CNI.Folders
	if f := part.CNI.Folder; f != nil && *f != "" {
		c.PluginFolders = append(c.PluginFolders, *f)
	}
	if len(c.PluginFolders) == 0 {
		c.PluginFolders = []string{pluginFolder}
	}
}

// containerd judges a configuration that `machine add` keeps, because it was changed by hand.
func (j *judge) containerd() {
	c := j.f.Containerd
	if c == nil || c.Source == containerdPackage || j.member {
		return
	}
	const file = "/etc/containerd/config.toml"
	x := plan.Finding{Objects: []string{file}}
	if c.Source == string(Unread) {
		x.Title = "not checked whether " + file + " has what a node needs: SystemdCgroup = true, and " + pluginFolder + " in bin_dir"
		x.Remedy, x.Command = "check it by hand", "containerd config dump | grep -e SystemdCgroup -e bin_dir -e disabled_plugins"
		j.add(plan.NotChecked, "machine-containerd", x)
		return
	}
	var wrong []string
	if !c.CRI {
		wrong = append(wrong, "disabled_plugins turns off the CRI plugin, which serves the kubelet")
	}
	if !c.SystemdCgroup {
		wrong = append(wrong, "SystemdCgroup of the runtime "+sshhost.Text([]byte(c.Runtime))+" is not true")
	}
	x.Command = "mv " + file + " " + file + ".before"
	if len(wrong) > 0 {
		x.Title, x.Detail = file+" was changed by hand and does not fit a node", strings.Join(wrong, "; ")
		x.Remedy = "set this there and restart containerd, or move the file away: `machine add` then writes its own"
		j.add(plan.Block, "machine-containerd", x)
	}
	if !slices.Contains(c.PluginFolders, pluginFolder) {
		x.Title, x.Detail = "containerd does not find network plugins in "+pluginFolder+", where most install themselves", "bin_dir in "+file+" is "+sshhost.Text([]byte(words.And(c.PluginFolders)))
		x.Remedy = "set bin_dir to " + pluginFolder + " and restart containerd, or move the file away: `machine add` then writes its own; leave it if the plugin of the cluster is in that folder"
		j.add(plan.Warn, "machine-containerd", x)
	}
}
