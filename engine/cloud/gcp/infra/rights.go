package infra

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"constellation/engine/cloud/section"
	"constellation/engine/infra"
)

// actAs is granted for an account, not for the project.
const actAs = "iam.serviceAccounts.actAs"

// uses are the permissions of the methods that this package calls, as far as Google's pages list them. A test compares
// the methods with the calls.
var uses = map[string][]string{
	"networks.list":              {"compute.networks.list"},
	"networks.insert":            {"compute.networks.create"},
	"networks.delete":            {"compute.networks.delete"},
	"subnetworks.list":           {"compute.subnetworks.list"},
	"subnetworks.insert":         {"compute.subnetworks.create", "compute.networks.updatePolicy"},
	"subnetworks.delete":         {"compute.subnetworks.delete", "compute.networks.updatePolicy"},
	"firewalls.list":             {"compute.firewalls.list"},
	"firewalls.insert":           {"compute.firewalls.create", "compute.networks.updatePolicy"},
	"firewalls.delete":           {"compute.firewalls.delete", "compute.networks.updatePolicy"},
	"addresses.list":             {"compute.addresses.list"},
	"addresses.insert":           {"compute.addresses.create"},
	"addresses.setLabels":        {"compute.addresses.setLabels"},
	"addresses.delete":           {"compute.addresses.delete"},
	"regionHealthChecks.list":    {"compute.regionHealthChecks.list"},
	"regionHealthChecks.insert":  {"compute.regionHealthChecks.create"},
	"regionHealthChecks.delete":  {"compute.regionHealthChecks.delete"},
	"instanceTemplates.list":     {"compute.instanceTemplates.list"},
	"instanceTemplates.get":      {"compute.instanceTemplates.get"},
	"instanceTemplates.insert":   {"compute.instanceTemplates.create"},
	"instanceTemplates.delete":   {"compute.instanceTemplates.delete"},
	"instanceGroupManagers.list": {"compute.instanceGroupManagers.list"},
	"instanceGroupManagers.insert": {
		"compute.instanceGroupManagers.create", "compute.instanceTemplates.useReadOnly", "compute.instances.create", "compute.disks.create", "compute.images.useReadOnly",
		"compute.subnetworks.use", "compute.subnetworks.useExternalIp", "compute.instances.setMetadata", "compute.instances.setTags", "compute.instances.setLabels",
		"compute.instances.setServiceAccount", actAs,
	},
	"instanceGroupManagers.delete":               {"compute.instanceGroupManagers.delete", "compute.instances.delete"},
	"instanceGroupManagers.listManagedInstances": {"compute.instanceGroupManagers.get"},
	"regionBackendServices.list":                 {"compute.regionBackendServices.list"},
	"regionBackendServices.insert":               {"compute.regionBackendServices.create", "compute.regionHealthChecks.useReadOnly", "compute.instanceGroups.use"},
	"regionBackendServices.delete":               {"compute.regionBackendServices.delete"},
	"instanceGroups.setNamedPorts":               {"compute.instanceGroups.update"},
	"regionTargetTcpProxies.list":                {"compute.regionTargetTcpProxies.list"},
	"regionTargetTcpProxies.insert":              {"compute.regionTargetTcpProxies.create", "compute.regionBackendServices.use"},
	"regionTargetTcpProxies.delete":              {"compute.regionTargetTcpProxies.delete"},
	"forwardingRules.list":                       {"compute.forwardingRules.list"},
	"forwardingRules.insert":                     {"compute.forwardingRules.create", "compute.regionTargetTcpProxies.use", "compute.addresses.use", "compute.networks.use"},
	"forwardingRules.setLabels":                  {"compute.forwardingRules.setLabels"},
	"forwardingRules.delete":                     {"compute.forwardingRules.delete"},
	"instances.list":                             {"compute.instances.list"},
	"instances.delete":                           {"compute.instances.delete"},
	"images.list":                                {"compute.images.list"},
	"machineTypes.get":                           {"compute.machineTypes.get"},
	"globalOperations.list":                      {"compute.globalOperations.list"},
	"globalOperations.wait":                      {"compute.globalOperations.get"},
	"regionOperations.list":                      {"compute.regionOperations.list"},
	"regionOperations.wait":                      {"compute.regionOperations.get"},
	"zoneOperations.list":                        {"compute.zoneOperations.list"},
	"zoneOperations.wait":                        {"compute.zoneOperations.get"},
}

// operates are those of the methods that control planes call: views of package gcp.
var operates = map[string][]string{
	"instances.list":                             {"compute.instances.list"},
	"instances.get":                              {"compute.instances.get"},
	"instanceGroupManagers.list":                 {"compute.instanceGroupManagers.list"},
	"instanceGroupManagers.listManagedInstances": {"compute.instanceGroupManagers.get"},
	"instanceGroupManagers.createInstances":      {"compute.instanceGroupManagers.update"},
	"instanceGroupManagers.deleteInstances":      {"compute.instanceGroupManagers.update"},
	"instanceGroupManagers.patch":                {"compute.instanceGroupManagers.update"},
	"instanceTemplates.get":                      {"compute.instanceTemplates.get"},
	"instanceTemplates.insert":                   {"compute.instanceTemplates.create"},
	"zoneOperations.list":                        {"compute.zoneOperations.list"},
	"zoneOperations.wait":                        {"compute.zoneOperations.get"},
	"globalOperations.wait":                      {"compute.globalOperations.get"},
}

// disks are the permissions of the driver of persistent disks beside a role of Google, as its publisher states them. They are
// not methods that this program calls.
var disks = []infra.Right{
	{Permission: "compute.instances.attachDisk", Methods: []string{"instances.attachDisk"}},
	{Permission: "compute.instances.detachDisk", Methods: []string{"instances.detachDisk"}},
}

// judges are those of the methods that workers call: they read the join service that they join.
var judges = map[string][]string{"instances.get": {"compute.instances.get"}}

// rights turns methods with permissions into permissions with methods, sorted.
func rights(methods map[string][]string) (out []infra.Right) {
	by := map[string][]string{}
	for method, permissions := range methods {
		for _, p := range permissions {
			by[p] = append(by[p], method)
		}
	}
	for _, p := range slices.Sorted(maps.Keys(by)) {
		slices.Sort(by[p])
		out = append(out, infra.Right{Permission: p, Methods: by[p]})
	}
	return out
}

// Roles implements infra.Vendor.
func Roles(config section.Values) []infra.Role {
	project := cmp.Or(config.Text(Project), "PROJECT")
	account := cmp.Or(config.Text(ServiceAccount), "control-plane@"+project+".iam.gserviceaccount.com")
	workers := cmp.Or(config.Text(WorkerAccount), "worker@"+project+".iam.gserviceaccount.com")
	name, _, _ := strings.Cut(account, "@")
	workerName, _, _ := strings.Cut(workers, "@")
	console := infra.Role{Name: "infra", For: "the account that runs `constellation infra`", Rights: rights(uses)}
	console.Text = roleText(console, project, "constellation_infra", []string{
		fmt.Sprintf("gcloud projects add-iam-policy-binding %s --member=user:YOU --role=projects/%s/roles/constellation_infra", project, project),
		fmt.Sprintf("gcloud iam service-accounts add-iam-policy-binding %s --project=%s --member=user:YOU --role=roles/iam.serviceAccountUser", account, project),
		fmt.Sprintf("gcloud iam service-accounts add-iam-policy-binding %s --project=%s --member=user:YOU --role=roles/iam.serviceAccountUser", workers, project),
		"The last two commands grant " + actAs + " for the two accounts alone.",
	})
	control := infra.Role{Name: "control-plane", For: "the service account of control planes", Rights: rights(operates)}
	commands := []string{
		fmt.Sprintf("gcloud iam service-accounts create %s --project=%s", name, project),
		fmt.Sprintf("gcloud projects add-iam-policy-binding %s --member=serviceAccount:%s --role=projects/%s/roles/constellation_control_plane", project, account, project),
		fmt.Sprintf("gcloud iam service-accounts add-iam-policy-binding %s --project=%s --member=serviceAccount:%s --role=roles/iam.serviceAccountUser", account, project, account),
		fmt.Sprintf("gcloud iam service-accounts add-iam-policy-binding %s --project=%s --member=serviceAccount:%s --role=roles/iam.serviceAccountUser", workers, project, account),
		"The last two commands let it make templates with the two accounts. The driver of disks needs them, too.",
	}
	if config.Bool(Disks) {
		control.Rights = append(control.Rights, disks...)
		commands = append(commands, fmt.Sprintf("gcloud projects add-iam-policy-binding %s --member=serviceAccount:%s --role=roles/compute.storageAdmin", project, account),
			"The last command is for the driver of disks: its publisher states this role. It lets control planes delete all disks and snapshots of the project.")
	}
	control.Text = roleText(control, project, "constellation_control_plane", commands)
	worker := infra.Role{Name: "worker", For: "the service account of workers", Rights: rights(judges)}
	worker.Text = roleText(worker, project, "constellation_worker", []string{
		fmt.Sprintf("gcloud iam service-accounts create %s --project=%s", workerName, project),
		fmt.Sprintf("gcloud projects add-iam-policy-binding %s --member=serviceAccount:%s --role=projects/%s/roles/constellation_worker", project, workers, project),
	})
	return []infra.Role{console, control, worker}
}

// roleText is a role in the format of `gcloud iam roles create --file`, with the commands as comments.
func roleText(r infra.Role, project, id string, commands []string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# The least role of %s. Save it as role.yaml, then run:\n", r.For)
	fmt.Fprintf(&b, "#   gcloud iam roles create %s --project=%s --file=role.yaml\n", id, project)
	for _, c := range commands {
		if strings.HasPrefix(c, "gcloud") {
			c = "  " + c
		}
		fmt.Fprintf(&b, "# %s\n", c)
	}
	fmt.Fprintf(&b, "title: Constellation %s\nstage: GA\nincludedPermissions:\n", r.Name)
	for _, p := range r.Rights {
		if p.Permission != actAs {
			fmt.Fprintf(&b, "- %s\n", p.Permission)
		}
	}
	return b.String()
}
