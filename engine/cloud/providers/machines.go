package providers

import "constellation/engine/cloud/machines"

// inventory is the list of machines that exist already. Only adopted clusters have it so far.
func inventory() Provider {
	return Provider{
		Name:      machines.Name,
		Inventory: true,
		NoImages:  true,
		Config:    machines.Config(),
		About:     "machines is a list of machines that exist already; `constellation adopt` writes it.",
		Advice: Advice{
			Cloud:  "the inventory",
			Look:   "`kubectl get nodes -o wide`",
			Create: "run `constellation adopt`",
			Renew:  "reset the machines with `kubeadm reset`",
		},
	}
}
