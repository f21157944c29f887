package simulated

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"constellation/engine/kubeadm"
	"constellation/internal/delay"
)

// startOurs runs a pod of our charts as processes.
func (k *kubelet) startOurs(ctx context.Context, pod *corev1.Pod) (*workload, error) {
	dir := k.c.path(podsDir, string(pod.UID))
	command, kubeconfig, err := k.programs(ctx, pod, dir)
	if err != nil {
		return nil, err
	}
	ports, err := k.nodePorts(ctx, pod)
	if err != nil {
		return nil, err
	}
	k.log.Info("pod started as processes", "pod", pod.Namespace+"/"+pod.Name)
	return k.c.pods.start(string(pod.UID), "", pod, dir, ports, func(spec *corev1.Container) (*exec.Cmd, error) {
		cmd, err := command(spec)
		if err == nil && kubeconfig != "" {
			cmd.Args = append(cmd.Args, "--kubeconfig="+kubeconfig)
		}
		return cmd, err
	}), nil
}

// programs writes a pod's volumes to dir, and returns the commands of its containers with our
// images. A process sees the computer's files, so its environment names the pod's
// credentials: kubeconfig, empty if it has none.
func (k *kubelet) programs(ctx context.Context, pod *corev1.Pod, dir string) (command func(*corev1.Container) (*exec.Cmd, error), kubeconfig string, err error) {
	volumes, err := k.volumes(ctx, pod, dir)
	if err != nil {
		return nil, "", err
	}
	if kubeconfig, err = k.podKubeconfig(pod, dir, volumes); err != nil {
		return nil, "", err
	}
	env := map[string][]string{}
	for _, spec := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		if env[spec.Name], err = k.environment(ctx, pod, &spec, volumes); err != nil {
			return nil, "", err
		}
	}
	return func(spec *corev1.Container) (*exec.Cmd, error) {
		program, _, err := k.c.program(spec.Image)
		if err != nil {
			return nil, err
		}
		mounts := k.c.mountsOf(pod, spec, volumes)
		words := append([]string{}, spec.Args...)
		if len(spec.Command) > 0 {
			words = append(append([]string{}, spec.Command[1:]...), spec.Args...)
		}
		var args []string
		for _, a := range words {
			args = append(args, k.c.translate(a, mounts))
		}
		cmd := exec.Command(program, args...) //nolint:noctx // see spawn
		cmd.Env = append(os.Environ(), env[spec.Name]...)
		return cmd, nil
	}, kubeconfig, nil
}

// emptyDir is the short path of a volume that begins empty.
func (c *computer) emptyDir(pod *corev1.Pod, volume string) string {
	sum := sha256.Sum256([]byte(string(pod.UID) + "/" + volume))
	return c.path(emptyDirs, hex.EncodeToString(sum[:3]))
}

// relink makes a symbolic link, and replaces the one of a former process.
func relink(to, link string) error {
	if err := os.MkdirAll(filepath.Dir(link), 0o700); err != nil {
		return err
	}
	if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.Symlink(to, link)
}

// volumes writes the volumes of a pod, except host paths, and returns the directories by name.
func (k *kubelet) volumes(ctx context.Context, pod *corev1.Pod, dir string) (map[string]string, error) {
	out := map[string]string{}
	for _, v := range pod.Spec.Volumes {
		to := filepath.Join(dir, "volumes", v.Name)
		if v.HostPath != nil {
			path := k.c.local(v.HostPath.Path)
			if t := v.HostPath.Type; t != nil && *t == corev1.HostPathDirectory {
				if i, err := os.Stat(path); err != nil || !i.IsDir() {
					return nil, fmt.Errorf("volume %s: %s is no directory", v.Name, v.HostPath.Path)
				}
			}
			continue
		}
		if err := os.MkdirAll(to, 0o700); err != nil {
			return nil, err
		}
		out[v.Name] = to
		files := map[string][]byte{}
		var err error
		switch {
		case v.EmptyDir != nil:
			out[v.Name] = k.c.emptyDir(pod, v.Name)
			err = relink(to, out[v.Name])
		case v.ConfigMap != nil:
			err = k.configMap(ctx, pod.Namespace, v.ConfigMap.Name, v.ConfigMap.Items, v.ConfigMap.Optional, files)
		case v.Secret != nil:
			err = k.secret(ctx, pod.Namespace, v.Secret.SecretName, v.Secret.Items, v.Secret.Optional, files)
		case v.DownwardAPI != nil:
			downward(pod, k.c, v.DownwardAPI.Items, files)
		case v.Projected != nil:
			err = k.projected(ctx, pod, v.Projected, files)
		default:
			err = errors.New("this kind of volume is not simulated")
		}
		if err != nil {
			return nil, fmt.Errorf("volume %s: %w", v.Name, err)
		}
		for name, data := range files {
			if err := writeBelow(to, name, data, 0o600); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

func (k *kubelet) projected(ctx context.Context, pod *corev1.Pod, p *corev1.ProjectedVolumeSource, files map[string][]byte) error {
	for _, s := range p.Sources {
		var err error
		switch {
		case s.ConfigMap != nil:
			err = k.configMap(ctx, pod.Namespace, s.ConfigMap.Name, s.ConfigMap.Items, s.ConfigMap.Optional, files)
		case s.Secret != nil:
			err = k.secret(ctx, pod.Namespace, s.Secret.Name, s.Secret.Items, s.Secret.Optional, files)
		case s.DownwardAPI != nil:
			downward(pod, k.c, s.DownwardAPI.Items, files)
		case s.ServiceAccountToken != nil:
			files[s.ServiceAccountToken.Path], err = k.token(ctx, pod, s.ServiceAccountToken)
		default:
			err = errors.New("this kind of source is not simulated")
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// token requests a token of the pod's ServiceAccount that is bound to the pod.
func (k *kubelet) token(ctx context.Context, pod *corev1.Pod, t *corev1.ServiceAccountTokenProjection) ([]byte, error) {
	seconds := int64(tokenSeconds)
	if t.ExpirationSeconds != nil {
		seconds = *t.ExpirationSeconds
	}
	req := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		ExpirationSeconds: &seconds,
		BoundObjectRef:    &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID},
	}}
	if t.Audience != "" {
		req.Spec.Audiences = []string{t.Audience}
	}
	got, err := k.client.CoreV1().ServiceAccounts(pod.Namespace).CreateToken(ctx, pod.Spec.ServiceAccountName, req, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("ask for a token of ServiceAccount %s: %w", pod.Spec.ServiceAccountName, err)
	}
	// Renewed when most of its lifetime is over, as kubelets do.
	life := time.Until(got.Status.ExpirationTimestamp.Time)
	k.mu.Lock()
	k.tokens[pod.UID] = time.Now().Add(life * 4 / 5)
	k.mu.Unlock()
	return []byte(got.Status.Token), nil
}

// refresh renews the tokens of a running pod.
func (k *kubelet) refresh(ctx context.Context, pod *corev1.Pod) error {
	k.mu.Lock()
	due, known := k.tokens[pod.UID]
	k.mu.Unlock()
	if known && time.Now().Before(due) {
		return nil
	}
	for _, v := range pod.Spec.Volumes {
		if v.Projected == nil {
			continue
		}
		for _, s := range v.Projected.Sources {
			if s.ServiceAccountToken == nil {
				continue
			}
			b, err := k.token(ctx, pod, s.ServiceAccountToken)
			if err != nil {
				return err
			}
			if err := writeBelow(k.c.path(podsDir, string(pod.UID), "volumes", v.Name), s.ServiceAccountToken.Path, b, 0o600); err != nil {
				return err
			}
		}
	}
	if !known { // a pod without tokens
		k.mu.Lock()
		if _, ok := k.tokens[pod.UID]; !ok {
			k.tokens[pod.UID] = time.Now().Add(time.Hour)
		}
		k.mu.Unlock()
	}
	return nil
}

func pick[T any](data map[string]T, items []corev1.KeyToPath, bytes func(T) []byte, files map[string][]byte) error {
	if items == nil {
		for name, v := range data {
			files[name] = bytes(v)
		}
		return nil
	}
	for _, i := range items {
		v, ok := data[i.Key]
		if !ok {
			return fmt.Errorf("there is no key %s", i.Key)
		}
		files[i.Path] = bytes(v)
	}
	return nil
}

func (k *kubelet) configMap(ctx context.Context, namespace, name string, items []corev1.KeyToPath, optional *bool, files map[string][]byte) error {
	cm, err := k.client.CoreV1().ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		if optional != nil && *optional {
			return nil
		}
		return err
	}
	return pick(cm.Data, items, func(s string) []byte { return []byte(s) }, files)
}

func (k *kubelet) secret(ctx context.Context, namespace, name string, items []corev1.KeyToPath, optional *bool, files map[string][]byte) error {
	s, err := k.client.CoreV1().Secrets(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		if optional != nil && *optional {
			return nil
		}
		return err
	}
	return pick(s.Data, items, func(b []byte) []byte { return b }, files)
}

func downward(pod *corev1.Pod, c *computer, items []corev1.DownwardAPIVolumeFile, files map[string][]byte) {
	for _, i := range items {
		if i.FieldRef != nil {
			files[i.Path] = []byte(field(pod, c, i.FieldRef.FieldPath))
		}
	}
}

// field returns a field of a pod for the downward API.
func field(pod *corev1.Pod, c *computer, path string) string {
	switch path {
	case "metadata.name":
		return pod.Name
	case "metadata.namespace":
		return pod.Namespace
	case "metadata.uid":
		return string(pod.UID)
	case "spec.nodeName":
		return pod.Spec.NodeName
	case "spec.serviceAccountName":
		return pod.Spec.ServiceAccountName
	case "status.hostIP", "status.podIP":
		return c.IP.String()
	}
	if key, ok := strings.CutPrefix(path, "metadata.labels['"); ok {
		return pod.Labels[strings.TrimSuffix(key, "']")]
	}
	if key, ok := strings.CutPrefix(path, "metadata.annotations['"); ok {
		return pod.Annotations[strings.TrimSuffix(key, "']")]
	}
	return ""
}

// environment is that of a container.
func (k *kubelet) environment(ctx context.Context, pod *corev1.Pod, spec *corev1.Container, volumes map[string]string) ([]string, error) {
	mounts := k.c.mountsOf(pod, spec, volumes)
	out := []string{"KUBERNETES_SERVICE_HOST=" + Gateway(k.c.Nodes).String(), "KUBERNETES_SERVICE_PORT=6443"}
	for _, from := range spec.EnvFrom {
		files := map[string][]byte{}
		var err error
		switch {
		case from.ConfigMapRef != nil:
			err = k.configMap(ctx, pod.Namespace, from.ConfigMapRef.Name, nil, from.ConfigMapRef.Optional, files)
		case from.SecretRef != nil:
			err = k.secret(ctx, pod.Namespace, from.SecretRef.Name, nil, from.SecretRef.Optional, files)
		}
		if err != nil {
			return nil, fmt.Errorf("variables: %w", err)
		}
		for _, name := range slices.Sorted(maps.Keys(files)) {
			out = append(out, k.c.translate(from.Prefix+name+"="+string(files[name]), mounts))
		}
	}
	for _, e := range spec.Env {
		value := e.Value
		if from := e.ValueFrom; from != nil {
			files := map[string][]byte{}
			var key string
			var err error
			switch {
			case from.FieldRef != nil:
				value = field(pod, k.c, from.FieldRef.FieldPath)
			case from.ConfigMapKeyRef != nil:
				key = from.ConfigMapKeyRef.Key
				err = k.configMap(ctx, pod.Namespace, from.ConfigMapKeyRef.Name, nil, from.ConfigMapKeyRef.Optional, files)
			case from.SecretKeyRef != nil:
				key = from.SecretKeyRef.Key
				err = k.secret(ctx, pod.Namespace, from.SecretKeyRef.Name, nil, from.SecretKeyRef.Optional, files)
			}
			if err != nil {
				return nil, fmt.Errorf("variable %s: %w", e.Name, err)
			}
			if key != "" {
				value = string(files[key])
			}
		}
		out = append(out, k.c.translate(e.Name+"="+value, mounts))
	}
	return out, nil
}

// podKubeconfig writes the pod's kubeconfig with its ServiceAccount's token file, which is
// read again after each renewal. It returns "" if the pod mounts none.
func (k *kubelet) podKubeconfig(pod *corev1.Pod, dir string, volumes map[string]string) (string, error) {
	for i := range pod.Spec.Containers {
		for _, m := range pod.Spec.Containers[i].VolumeMounts {
			from, ok := volumes[m.Name]
			if !ok || m.MountPath != serviceAccounts {
				continue
			}
			cfg := clientcmdapi.NewConfig()
			cfg.Clusters["c"] = &clientcmdapi.Cluster{
				Server: "https://" + net.JoinHostPort(Gateway(k.c.Nodes).String(), "6443"), CertificateAuthority: filepath.Join(from, "ca.crt"),
			}
			cfg.AuthInfos["pod"] = &clientcmdapi.AuthInfo{TokenFile: filepath.Join(from, "token")}
			cfg.Contexts["pod"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "pod", Namespace: pod.Namespace}
			cfg.CurrentContext = "pod"
			path := filepath.Join(dir, "kubeconfig")
			return path, clientcmd.WriteToFile(*cfg, path)
		}
	}
	return "", nil
}

// nodePorts maps the node ports of this machine to ports of the pod's
// containers, according to its Services.
func (k *kubelet) nodePorts(ctx context.Context, pod *corev1.Pod) (map[int]int, error) {
	services, err := k.client.CoreV1().Services(pod.Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("look for its Services: %w", err)
	}
	out := map[int]int{}
	for _, s := range services.Items {
		if s.Spec.Type != corev1.ServiceTypeNodePort || len(s.Spec.Selector) == 0 || !labels.SelectorFromSet(s.Spec.Selector).Matches(labels.Set(pod.Labels)) {
			continue
		}
		for _, p := range s.Spec.Ports {
			for i := range pod.Spec.Containers {
				if port := portOf(&pod.Spec.Containers[i], p.TargetPort); port != 0 {
					out[int(p.NodePort)] = port
				}
			}
		}
	}
	return out, nil
}

// forward replaces kube-proxy: it forwards a node port of the machine to a pod on it
// until ctx ends.
func (p *pods) forward(ctx context.Context, nodePort, port int) {
	address := func(port int) string { return net.JoinHostPort(p.c.IP.String(), strconv.Itoa(port)) }
	var lc net.ListenConfig
	var l net.Listener
	for {
		var err error
		if l, err = lc.Listen(ctx, "tcp", address(nodePort)); err == nil {
			break
		}
		if !delay.For(ctx, lookEvery) { // the previous pod has it
			return
		}
	}
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	defer l.Close()
	for {
		in, err := l.Accept()
		if err != nil {
			return
		}
		go splice(ctx, in, address(port))
	}
}

// splice copies bytes between a connection and an address until either ends.
func splice(ctx context.Context, in net.Conn, address string) {
	defer in.Close()
	out, err := (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, "tcp", address)
	if err != nil {
		return
	}
	defer out.Close()
	stop := context.AfterFunc(ctx, func() { in.Close(); out.Close() })
	defer stop()
	var wg sync.WaitGroup
	pipe := func(to, from net.Conn) {
		_, _ = io.Copy(to, from)
		if c, ok := to.(interface{ CloseWrite() error }); ok {
			_ = c.CloseWrite()
		}
	}
	wg.Go(func() { pipe(out, in) })
	pipe(in, out)
	wg.Wait()
}

// serveOn serves h at an address until ctx ends.
func serveOn(ctx context.Context, address string, h http.Handler, config *tls.Config) error {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	if config != nil {
		l = tls.NewListener(l, config)
	}
	s := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second}
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	if err := s.Serve(l); ctx.Err() == nil {
		return err
	}
	return nil
}

// serveAPI is the kubelet's server for the API server: logs of processes, and the ports
// of pods.
func (k *kubelet) serveAPI(ctx context.Context) error {
	cert, err := tls.LoadX509KeyPair(k.c.root(kubeadm.KubeletCertFile), k.c.root(kubeadm.KubeletKeyFile))
	if err != nil {
		return fmt.Errorf("serve: %w", err)
	}
	ca, err := os.ReadFile(k.c.root(kubeadm.PKIDir, "ca.crt"))
	if err != nil {
		return fmt.Errorf("serve: %w", err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") })
	mux.HandleFunc("GET /containerLogs/{namespace}/{pod}/{container}", k.logs)
	mux.HandleFunc("/portForward/{namespace}/{pod}", k.portForward)
	mux.HandleFunc("GET /configz", k.configz)
	mux.HandleFunc("GET /flagz", k.flagz)
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// Callers authenticate with a client certificate of the cluster: as the API server or, for
		// the kubelet's report about itself, as an administrator.
		if len(r.TLS.PeerCertificates) == 0 || !mayCall(r.TLS.PeerCertificates[0].Subject, r.URL.Path) {
			http.Error(w, "Unauthorized", http.StatusUnauthorized)
			return
		}
		mux.ServeHTTP(w, r)
	})
	return serveOn(ctx, net.JoinHostPort(k.c.IP.String(), strconv.Itoa(kubeletPort)), h, &tls.Config{
		MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{cert}, ClientAuth: tls.VerifyClientCertIfGiven, ClientCAs: pool,
	})
}
