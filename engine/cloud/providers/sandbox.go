package providers

import (
	"path/filepath"

	"constellation/engine/attestation"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/cloud/section"
)

// Local is the provider of a cloud that this program runs on this computer.
const Local = "sandbox"

// sandbox is the cloud that package sandbox runs on this computer.
func sandbox() Provider {
	const problem = "cannot name a sandbox"
	return Provider{
		Name:  Local,
		Title: "local test cloud",
		Config: section.Schema{
			{Name: "name", Required: true, Identity: true, Valid: sandboxapi.ValidName, Problem: problem, Remedy: "use at most 40 of a-z, 0-9 and -"},
		},
		State: section.Schema{
			{Name: "name", Required: true, Identity: true, Valid: sandboxapi.ValidName, Problem: problem},
			{Name: "socket", Required: true, Valid: filepath.IsAbs, Problem: "is no absolute path"},
			{Name: "hollow", Kind: section.Bool},
			{Name: "simulated", Kind: section.Bool},
		},
		About:   "sandbox is the cloud on this\ncomputer; `constellation sandbox up` starts it.",
		Example: func(cluster string) section.Values { return section.Values{"name": cluster} },
		Advice: Advice{
			Cloud:        "sandbox {name}",
			Unreachable:  "is sandbox {name} running? `constellation sandbox status` shows it, `constellation sandbox up` starts it",
			Denied:       "run as the user that started the sandbox",
			Look:         "`constellation sandbox status`",
			Failed:       "`constellation sandbox status` shows where their console is",
			Up:           "sandbox up",
			UpTitle:      "Start a sandbox",
			UpReason:     "a cloud on this computer, with machines that boot for real; it writes the configuration",
			Create:       "run `constellation sandbox up`",
			Renew:        "run `constellation sandbox down`, then `up`",
			Measurements: "run `constellation sandbox up`, which fills in the measurements of the sandbox's image",
			Catalogue:    "`constellation sandbox status -o json`",
			Roots:        "run `constellation sandbox up`, which fills in those of the sandbox",
			Offer:        "run `constellation sandbox fetch {version}`",
			Image:        "start the sandbox with --image {version}",
		},
		ImageVersion: func(reference string) string {
			_, v, _ := sandboxapi.ParseImageReference(reference)
			return v
		},
		GroupName: func(id string) string {
			_, group, _ := sandboxapi.ParseGroupID(id)
			return group
		},
		Simulated: func(state section.Values) bool { return state.Bool("simulated") },
		Fixed: func(state section.Values) (reason, remedy string) {
			if !state.Bool("hollow") {
				return "", ""
			}
			return "the machines of this cluster are hollow: simulated, so there is nothing to attest, to install or to upgrade on them",
				"change the target alone, with the kubectl line that `constellation sandbox up` ends with; `constellation watch` shows the rollout"
		},
		Console: func(_, state section.Values) (Console, error) {
			return sandboxapi.NewConsole(state.Text("socket")), nil
		},
		MetadataAddress: sandboxapi.DefaultMetadata,
		ControlAddress:  sandboxapi.DefaultControl,
		Attestation:     attestation.TPMMethod(),
		TPMAddress:      "unix:/run/tpm/tpm.sock",
		TPMDir:          sandboxapi.TPMDir,
		SealsKeys:       true,

		AutoscalerStandIn: true,
		Sandbox: func(s SandboxOf) (config, state section.Values) {
			return section.Values{"name": s.Name}, section.Values{"name": s.Name, "socket": s.Socket, "hollow": s.Hollow, "simulated": s.Simulated}
		},
		Metadata: func(address string) Metadata { return sandboxapi.NewMetadata(address) },
		Control: func(metadata, address string) Control {
			return sandboxapi.NewInCluster(sandboxapi.NewMetadata(metadata), address)
		},
	}
}
