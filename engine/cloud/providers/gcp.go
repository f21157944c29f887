package providers

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"path/filepath"
	"regexp"
	"strings"

	"constellation/engine/attestation"
	"constellation/engine/cloud"
	"constellation/engine/cloud/gcp"
	"constellation/engine/cloud/gcp/attest"
	"constellation/engine/cloud/gcp/gcloud"
	"constellation/engine/cloud/sandboxapi"
	"constellation/engine/cloud/section"
	"constellation/engine/component"
	"constellation/engine/version"
)

var (
	projectRE  = regexp.MustCompile(`^[a-z]([a-z0-9-]{4,28}[a-z0-9])$`)
	zoneRE     = regexp.MustCompile(`^[a-z]+(-[a-z0-9]+)+-[a-z]$`)
	nameRE     = regexp.MustCompile(`^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$`)
	stockRE    = regexp.MustCompile(`^v[0-9]+\.[0-9]+\.[0-9]+=projects/[a-z][-a-z0-9.:]*/global/images/[a-z]([-a-z0-9]*[a-z0-9])?$`)
	ownImageRE = regexp.MustCompile(`^[a-z0-9][-a-z0-9._:/]*:v[0-9]+\.[0-9]+\.[0-9]+@sha256:[0-9a-f]{64}$`)
	accountRE  = regexp.MustCompile(`^[a-z0-9][-a-z0-9.]*@[-a-z0-9.]+\.[a-z]+$`)
)

// madeFields are the fields that only `infra` uses.
var madeFields = section.Schema{
	{Name: "network", Valid: nameRE.MatchString, Problem: "cannot name a network", Remedy: "use the name of a network of the project"},
	{Name: "subnetwork", Valid: nameRE.MatchString, Problem: "cannot name a subnetwork", Remedy: "use the name of a subnetwork of the network"},
	{Name: "address", Valid: nameRE.MatchString, Problem: "cannot name an address", Remedy: "use the name of a reserved external address, not the address itself"},
	{Name: "nodeCIDR", Valid: rangeOf(8, 29), Problem: "is no range of IPv4 addresses", Remedy: "use a range such as 10.128.0.0/20"},
	{Name: "proxyCIDR", Valid: rangeOf(8, 26), Problem: "is no range of at least 64 IPv4 addresses", Remedy: "use a range such as 10.128.16.0/23"},
	{Name: "controlPlaneMachineType", Valid: nameRE.MatchString, Problem: "cannot name a machine type", Remedy: "use a machine type such as e2-standard-2"},
	{Name: "workerMachineType", Valid: nameRE.MatchString, Problem: "cannot name a machine type", Remedy: "use a machine type such as e2-standard-2"},
	{Name: "diskGiB", Kind: section.Int, Lowest: 10, Highest: 65536},
	{Name: "cloudControllerManager", Kind: section.Bool},
	{Name: "cloudControllerManagerChart", Kind: section.Bool},
	{Name: "cloudControllerManagerImage", Valid: ownImageRE.MatchString, Problem: "is no image with version and digest", Remedy: "write it as registry.k8s.io/cloud-provider-gcp/cloud-controller-manager:v36.0.7@sha256:..., in which 36 is the minor of Kubernetes"},
	{Name: "persistentDisksChart", Kind: section.Bool},
	{Name: "networkPlugin", Valid: func(s string) bool { return s == flannelChart }, Problem: "is no network plugin of this program", Remedy: "write flannel, or leave it out and install another one with charts"},
	{
		Name: "serviceAccount", Valid: accountRE.MatchString, Problem: "is no address of a service account", Remedy: "use an address such as NAME@PROJECT.iam.gserviceaccount.com",
		Ask: "account", Hint: "control-plane@my-project.iam.gserviceaccount.com", Help: "service account of control planes; `constellation infra plan --print-role=control-plane` has the commands that make it",
	},
	{
		Name: "workerServiceAccount", Valid: accountRE.MatchString, Problem: "is no address of a service account", Remedy: "use an address such as NAME@PROJECT.iam.gserviceaccount.com",
		Ask: "worker account", Hint: "worker@my-project.iam.gserviceaccount.com", Help: "service account of workers; `constellation infra plan --print-role=worker` has the commands that make it",
	},
	{Name: "images", Kind: section.List, Valid: stockRE.MatchString, Problem: "is no stock image of a version", Remedy: "use entries such as v1.1.0=projects/debian-cloud/global/images/debian-12-bookworm-v20260114; a family changes, so it is not accepted"},
	{Name: "programs", Valid: folderURL, Problem: "is no address of a folder", Remedy: "use an address such as https://storage.googleapis.com/my-bucket/v1.1.0, without a login"},
	{Name: "proxy", Valid: proxyURL, Problem: "is no proxy", Remedy: "write it as http://HOST:PORT, without a login"},
	{Name: "sshFrom", Kind: section.List, Valid: rangeOf(0, 32), Problem: "is no range of IPv4 addresses", Remedy: "use ranges such as 198.51.100.7/32"},
}

// rangeOf reports whether a text is a range of IPv4 addresses with a length of its prefix in bounds.
func rangeOf(shortest, longest int) func(string) bool {
	return func(s string) bool {
		p, err := netip.ParsePrefix(s)
		return err == nil && p.Addr().Is4() && p == p.Masked() && p.Bits() >= shortest && p.Bits() <= longest
	}
}

// folderURL reports whether a text is the URL of a folder that everybody may read.
func folderURL(s string) bool {
	u, err := url.Parse(s)
	return err == nil && folderRE.MatchString(s) && u.Hostname() != "" && u.User == nil && len(s) <= 1000
}

var folderRE = regexp.MustCompile(`^https?://[A-Za-z0-9._~:/%+-]+$`)

// proxyURL reports whether a text is the address of an HTTP proxy without a login.
func proxyURL(s string) bool {
	u, err := url.Parse(s)
	return err == nil && folderRE.MatchString(s) && u.Scheme == "http" && u.Hostname() != "" && u.Port() != "" && u.User == nil && strings.Trim(u.Path, "/") == ""
}

// stocked is the view of the console with the stock images of a configuration.
type stocked struct {
	Console
	images []cloud.Image
}

// Images implements Console.
func (s stocked) Images(ctx context.Context) ([]cloud.Image, error) {
	images, err := s.Console.Images(ctx)
	return append(images, s.images...), err
}

// withStock adds the stock images of a configuration.
func withStock(c Console, config section.Values) Console {
	s := stocked{Console: c}
	for _, entry := range config.List("images") {
		if v, ref, ok := strings.Cut(entry, "="); ok {
			s.images = append(s.images, cloud.Image{Reference: ref, Version: v})
		}
	}
	if len(s.images) == 0 {
		return c
	}
	return s
}

// emulatedZone is the zone of machines of a sandbox.
const emulatedZone = "europe-west3-a"

// gcpSocket is the field of a state with the socket of a sandbox that emulates Google Cloud. Real machines have none.
const gcpSocket = "socket"

// googleCloud is Google Cloud. A sandbox can emulate it.
func googleCloud() Provider {
	project := section.Field{
		Name: "project", Required: true, Identity: true, Valid: projectRE.MatchString, Problem: "cannot be the ID of a project",
		Remedy: "use the ID of the project, as `gcloud projects list` shows it",
		Ask:    "project", Hint: "my-project", Help: "ID of the project, as `gcloud projects list` shows it",
	}
	zones := section.Field{
		Name: "zones", Kind: section.List, Required: true, Valid: zoneRE.MatchString, Problem: "cannot name a zone", Remedy: "use zones such as " + emulatedZone,
		Ask: "zones", Hint: emulatedZone, Help: "zones with machines, of one region; several are separated by spaces",
	}
	return Provider{
		Name:   gcp.Name,
		Title:  "Google Cloud",
		Config: append(section.Schema{project, zones}, madeFields...),
		State: section.Schema{
			project, zones,
			{Name: "uid", Required: true},
			{Name: gcpSocket, Valid: filepath.IsAbs, Problem: "is no absolute path"},
			{Name: "simulated", Kind: section.Bool},
		},
		About: "gcp is Google\nCloud. It was tested with an emulator and with recorded evidence of machines, and never ran at Google:\nsee docs/clouds/gcp.md. project is the ID of the project, zones are those with machines of the cluster.\n`constellation infra create` makes them, with these service accounts of control planes and workers.",
		Example: func(string) section.Values {
			return section.Values{"project": "my-project", "zones": []string{emulatedZone}, "serviceAccount": "control-plane@my-project.iam.gserviceaccount.com", "workerServiceAccount": "worker@my-project.iam.gserviceaccount.com"}
		},
		Advice: Advice{
			Cloud:        "project {project}",
			Unreachable:  "check the network and the status page of Google Cloud; if a sandbox emulates it, `constellation sandbox up` starts it again",
			Denied:       "log in with `gcloud auth application-default login`, as an account that may read the machines of project {project}",
			Look:         "`gcloud compute instances list --project={project}`",
			Failed:       "`gcloud compute instances get-serial-port-output` shows why",
			Create:       "run `constellation infra create`",
			Renew:        "delete the machines of the instance groups, which makes them again",
			Measurements: "run `constellation config measure --write`, which trusts the first machine, or copy the value that belongs to the image",
			Roots:        "run `constellation config generate gcp` in another directory, which writes Google's roots",
			Offer:        "use a release that has the components of Kubernetes {version}",
			Image:        "import image {version} with the label constellation-version",
		},
		Infra:     true,
		Parts:     googleParts,
		Find:      findGoogle,
		GroupName: gcp.GroupName, MachinePage: gcp.MachinePage,
		Simulated: func(state section.Values) bool { return state.Bool("simulated") },
		Console: func(config, state section.Values) (Console, error) {
			c, err := openGoogle(context.Background(), state) // credentials are read from files at most
			if err != nil {
				return nil, err
			}
			if socket := state.Text(gcpSocket); socket != "" {
				return emulated{gcp.NewConsole(c), sandboxapi.NewConsole(socket)}, nil
			}
			return withStock(gcp.NewConsole(c), config), nil
		},
		MetadataAddress: gcp.DefaultMetadata,
		ControlAddress:  gcp.DefaultEndpoint,
		// Without a state or addresses of a machine, no cluster is known, and nothing is accepted.
		Attestation: googleMethod(nil),
		Judge:       googleJudge,
		OnMachine:   googleMachine,
		Roots:       attest.Roots,
		TPMAddress:  "/dev/tpmrm0",
		TPMDevice:   "/dev/tpmrm0",
		EventLogDir: "/sys/kernel/security",
		Certifier:   true,
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

// findGoogle finds the credentials and the project of the user. The names of the service accounts are those that
// `infra plan --print-role` uses.
func findGoogle() Found {
	f := gcloud.Find()
	out := Found{Credentials: f.Credentials, Err: f.Err, Config: section.Values{}}
	for name, value := range map[string]string{"project": f.Project, "zones": f.Zone} {
		if value != "" {
			out.Config[name] = value
		}
	}
	if f.Project != "" {
		out.Config["serviceAccount"] = "control-plane@" + f.Project + ".iam.gserviceaccount.com"
		out.Config["workerServiceAccount"] = "worker@" + f.Project + ".iam.gserviceaccount.com"
	}
	return out
}

// googleMethod is the method of machines at Google. find returns the project, the UID and the machines of the cluster.
func googleMethod(find func(context.Context) (attest.Cluster, error)) attestation.Method {
	if find == nil {
		find = func(context.Context) (attest.Cluster, error) {
			return attest.Cluster{}, errors.New("neither a state nor a metadata server names it")
		}
	}
	return attest.Method(attest.Config{Cluster: find})
}

// openGoogle returns a client for the machines of a state, which can be those of an emulator.
func openGoogle(ctx context.Context, state section.Values) (*gcp.Cloud, error) {
	o := gcp.Options{Project: state.Text("project"), UID: state.Text("uid"), Zones: state.List("zones")}
	if socket := state.Text(gcpSocket); socket != "" {
		return gcp.NewEmulator(ctx, socket, o)
	}
	return gcp.New(ctx, o)
}

// googleJudge is the Judge of Google Cloud, with the credentials of the user.
func googleJudge(state section.Values) attestation.Method {
	find := func(ctx context.Context) (attest.Cluster, error) {
		instances, err := openGoogle(context.WithoutCancel(ctx), state)
		return attest.Cluster{Project: state.Text("project"), UID: state.Text("uid"), Instances: instances}, err
	}
	if state.Text(gcpSocket) != "" {
		return attest.Emulated(attest.Config{Cluster: find})
	}
	return googleMethod(find)
}

// googleMachine is the OnMachine of Google Cloud. Package attest has the reasons for its rules.
func googleMachine(metadata, tpm string) (attestation.Method, error) {
	emulated, socket := gcp.Emulated(metadata), strings.HasPrefix(tpm, "unix:")
	machine := gcp.NewMachine(metadata, "")
	find := func(ctx context.Context) (attest.Cluster, error) {
		l, err := machine.Lookup(ctx)
		if err != nil {
			return attest.Cluster{}, err
		}
		return attest.Cluster{Project: l.Project, UID: l.UID, Instances: l}, nil
	}
	switch {
	case emulated && socket:
		return attest.Emulated(attest.Config{Cluster: find}), nil
	case metadata == gcp.DefaultMetadata && filepath.IsAbs(tpm):
		return googleMethod(find), nil
	}
	return attestation.Method{}, fmt.Errorf("the metadata server %s and the TPM %s are neither those of a machine at Google, %s and a device, nor those of a sandbox that emulates Google Cloud, whose TPMs are sockets", metadata, tpm, gcp.DefaultMetadata)
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
