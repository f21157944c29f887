package providers

import (
	"context"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"

	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/cloud/section"
	"constellation/engine/component"
	"constellation/engine/version"
)

var (
	projectRE = regexp.MustCompile(`^[a-z]([a-z0-9-]{4,28}[a-z0-9])$`)
	zoneRE    = regexp.MustCompile(`^[a-z]+(-[a-z0-9]+)+-[a-z]$`)
)

// emulatedZone is the zone of machines of a sandbox.
const emulatedZone = "europe-west3-a"

// gcpSocket is the field of a state with the socket of a sandbox that emulates Google Cloud. Real machines have none.
const gcpSocket = "socket"

// googleCloud is Google Cloud. A sandbox can emulate it.
func googleCloud() Provider {
	project := section.Field{
		Name: "project", Required: true, Identity: true, Valid: projectRE.MatchString, Problem: "cannot be the ID of a project",
		Remedy: "use the ID of the project, as `gcloud projects list` shows it",
	}
	zones := section.Field{Name: "zones", Kind: section.List, Required: true, Valid: zoneRE.MatchString, Problem: "cannot name a zone", Remedy: "use zones such as " + emulatedZone}
	return Provider{
		Name:   gcp.Name,
		Config: section.Schema{project, zones},
		State: section.Schema{
			project, zones,
			{Name: "uid", Required: true},
			{Name: gcpSocket, Valid: filepath.IsAbs, Problem: "is no absolute path"},
			{Name: "simulated", Kind: section.Bool},
		},
		About: "gcp is Google\nCloud. This release has no attestation for it: init refuses machines at Google. project is the ID of\nthe project, zones are those with machines of the cluster.",
		Example: func(string) section.Values {
			return section.Values{"project": "my-project", "zones": []string{emulatedZone}}
		},
		Advice: Advice{
			Cloud:        "project {project}",
			Unreachable:  "check the network and the status page of Google Cloud; if a sandbox emulates it, `constellation sandbox up` starts it again",
			Denied:       "log in with `gcloud auth application-default login`, as an account that may read the machines of project {project}",
			Look:         "`gcloud compute instances list --project={project}`",
			Failed:       "`gcloud compute instances get-serial-port-output` shows why",
			Create:       "make instance groups with the labels of docs/clouds/gcp.md",
			Renew:        "delete the machines of the instance groups, which makes them again",
			Measurements: "copy the value that belongs to the image",
			Roots:        "paste the root certificates of Google's attestation keys, after a |",
			Offer:        "use a release that has the components of Kubernetes {version}",
			Image:        "import image {version} with the label constellation-version",
		},
		GroupName: gcp.GroupName,
		Simulated: func(state section.Values) bool { return state.Bool("simulated") },
		Fixed: func(state section.Values) (reason, remedy string) {
			if state.Text(gcpSocket) != "" {
				return "", ""
			}
			return "this release cannot verify the attestation of machines at Google", "try the provider with `constellation sandbox up --cloud gcp`, or use a release that can"
		},
		Console: func(_, state section.Values) (Console, error) {
			ctx := context.Background() // credentials are read from files at most
			socket, o := state.Text(gcpSocket), gcp.Options{Project: state.Text("project"), UID: state.Text("uid"), Zones: state.List("zones")}
			if socket == "" {
				c, err := gcp.New(ctx, o)
				if err != nil {
					return nil, err
				}
				return gcp.NewConsole(c), nil
			}
			c, err := gcp.NewEmulatorConsole(ctx, socket, o)
			if err != nil {
				return nil, err
			}
			return emulated{c, sandboxapi.NewConsole(socket)}, nil
		},
		MetadataAddress: gcp.DefaultMetadata,
		ControlAddress:  gcp.DefaultEndpoint,
		// Machines of the emulator alone have evidence of this kind. Package attest has that of machines at Google.
		Attestation: attestation.TPMMethod(),
		TPMAddress:  "/dev/tpmrm0",
		TPMDevice:   "/dev/tpmrm0",
		Metadata:    func(address string) Metadata { return gcp.NewMachine(address, "") },
		Control:     func(metadata, address string) Control { return gcp.NewMachine(metadata, address) },

		Sandbox: func(s SandboxOf) (config, state section.Values) {
			project := "sandbox-" + s.Name
			project = strings.TrimRight(project[:min(len(project), 30)], "-")
			config = section.Values{"project": project, "zones": []string{emulatedZone}}
			state = section.Values{"project": config["project"], "zones": config["zones"], "uid": s.UID, gcpSocket: s.Socket, "simulated": s.Simulated}
			return config, state
		},
		Emulator: func(state section.Values) (Emulator, bool) {
			return Emulator{
				Metadata: gcp.EmulatorAddress(sandboxapi.DefaultMetadata, sandboxapi.DefaultControl), Control: sandboxapi.DefaultControl + gcp.ComputePath,
				TPM: "unix:/run/tpm/tpm.sock", TPMDir: sandboxapi.TPMDir,
			}, state.Text(gcpSocket) != ""
		},
	}
}

// emulated is the view of the console on a sandbox that emulates Google Cloud. The sandbox itself has what does not come
// from the cloud: the addresses, the measurements of its images, and the components of Kubernetes.
type emulated struct {
	gcp.Console
	sandbox sandboxapi.Console
}

// Describe implements Console.
func (e emulated) Describe(ctx context.Context) (cloud.Info, error) {
	about, err := e.Console.Describe(ctx)
	if err != nil {
		return about, err
	}
	host, err := e.sandbox.Describe(ctx)
	if err != nil {
		return about, err
	}
	if host.UID != about.UID {
		return about, fmt.Errorf("describe the emulator of Google Cloud: it has UID %s, want %s: %w", host.UID, about.UID, cloud.ErrNotFound)
	}
	return host, nil
}

// Images implements Console.
func (e emulated) Images(ctx context.Context) ([]cloud.Image, error) {
	images, err := e.Console.Images(ctx)
	if err != nil {
		return nil, err
	}
	built, err := e.sandbox.Images(ctx)
	if err != nil {
		return nil, err
	}
	for n := range images {
		for _, b := range built {
			if b.Version == images[n].Version {
				images[n].Measurements = b.Measurements
			}
		}
	}
	return images, nil
}

// Components implements Console.
func (e emulated) Components(ctx context.Context, v version.Version) (component.Signed, error) {
	return e.sandbox.Components(ctx, v)
}
