package providers

import (
	"constellation/engine/cloud/machines"
	"constellation/engine/cloud/section"
)

// inventory is the list of machines that exist already. Only adopted clusters have it.
func inventory() Provider {
	return Provider{
		Name:      machines.Name,
		Inventory: true,
		NoImages:  true,
		NoJoin:    true,
		Config:    machines.Config(),
		State:     section.Schema{{Name: "operator", Kind: section.Bool}},
		Console:   func(config, _ section.Values) (Console, error) { return machines.NewConsole(config), nil },
		Control:   func(_, address string) Control { return machines.NewControl(address) },

		GroupName:      machines.GroupName,
		ControlAddress: machines.InventoryFile,
		About:          "machines is a list of machines that exist already; `constellation adopt` writes it.",
		Advice: Advice{
			Cloud:  "the inventory",
			Look:   "`kubectl get nodes -o wide`",
			Create: "run `constellation adopt`",
			Renew:  "reset the machines with `kubeadm reset`",
			Offer:  "add kubeadm, kubelet and kubectl of Kubernetes {version} to components in the configuration, each with url and digest",
		},
	}
}
