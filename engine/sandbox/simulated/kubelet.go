package simulated

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/yaml"

	"constellation/internal/delay"
)

// StandIn is the name of the stand-in for a kubelet in all messages.
const StandIn = "kubelet stand-in (simulated)"

const (
	kubeletConf   = "etc/kubernetes/kubelet.conf"
	bootstrapConf = "etc/kubernetes/bootstrap-kubelet.conf"
	manifestsDir  = "etc/kubernetes/manifests"
	flagsFile     = "var/lib/kubelet/kubeadm-flags.env"

	kubeletHealthPort = "10248"
	kubeletPort       = 10250

	leaseNamespace  = "kube-node-lease"
	leaseSeconds    = 40
	heartbeatEvery  = 10 * time.Second
	lookEvery       = 250 * time.Millisecond
	mirrorKey       = "kubernetes.io/config.mirror"
	tokenSeconds    = 3600
	serviceAccounts = "/var/run/secrets/kubernetes.io/serviceaccount"
)

// kubelet is one run of the stand-in, from a start to a stop.
type kubelet struct {
	c       *computer
	log     *slog.Logger
	version string
	client  kubernetes.Interface
	node    types.UID
	store   cache.Store
	changed chan struct{}

	mu       sync.Mutex
	stopping map[types.UID]bool // pods that are being terminated
	ips      map[types.UID]netip.Addr
	dead     map[types.UID]bool // pods that were deleted and may still be in the store
	tokens   map[types.UID]time.Time

	manifests map[string]manifest // by name of the file; only staticPods uses it
}

// manifest is what a file with a static pod says.
type manifest struct {
	hash string // of the file
	pod  *corev1.Pod
}

// runKubelet runs the stand-in until ctx ends. Static pods run without a cluster.
func (c *computer) runKubelet(ctx context.Context) {
	k := &kubelet{
		c: c, log: c.log.With("program", StandIn), changed: make(chan struct{}, 1),
		stopping: map[types.UID]bool{}, ips: map[types.UID]netip.Addr{}, dead: map[types.UID]bool{}, tokens: map[types.UID]time.Time{},
		manifests: map[string]manifest{},
	}
	out, err := exec.CommandContext(ctx, c.root("usr/local/bin/kubelet"), "--version").Output()
	if err != nil {
		k.log.Error("kubelet not started", "err", err)
		return
	}
	k.version = strings.TrimPrefix(strings.TrimSpace(string(out)), "Kubernetes ")
	k.log.Info("kubelet stand-in started", "version", k.version)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { k.serve(ctx) })
	wg.Go(func() { k.loop(ctx, lookEvery, k.staticPods) })
	if !k.retry(ctx, "credentials", k.bootstrap) || !k.retry(ctx, "node", k.register) {
		return
	}
	wg.Go(func() { k.loop(ctx, heartbeatEvery, k.renew) })
	wg.Go(func() { k.loop(ctx, heartbeatEvery, k.heartbeat) })
	changed := func() {
		select {
		case k.changed <- struct{}{}:
		default:
		}
	}
	store, informer := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.NewListWatchFromClient(k.client.CoreV1().RESTClient(), "pods", metav1.NamespaceAll, fields.OneTermEqualSelector("spec.nodeName", c.Name)),
		ObjectType:    &corev1.Pod{},
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc: func(any) { changed() }, UpdateFunc: func(any, any) { changed() }, DeleteFunc: func(any) { changed() },
		},
	})
	k.mu.Lock()
	k.store = store
	k.mu.Unlock()
	wg.Go(func() { informer.RunWithContext(ctx) })
	if !cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
		return
	}
	wg.Go(func() { k.loop(ctx, lookEvery, k.sync) })
	<-ctx.Done()
}

// loop calls do at an interval, and at once when a pod has changed.
func (k *kubelet) loop(ctx context.Context, every time.Duration, do func(context.Context) error) {
	said := ""
	for {
		if err := do(ctx); err != nil && ctx.Err() == nil {
			if err.Error() != said { // log an unavailable API server once
				k.log.Warn("not done", "err", err)
			}
			said = err.Error()
		} else {
			said = ""
		}
		if !delay.For(ctx, every) {
			return
		}
	}
}

// retry retries an action until it succeeds; false if ctx ends first.
func (k *kubelet) retry(ctx context.Context, what string, do func(context.Context) error) bool {
	said := ""
	for {
		err := do(ctx)
		if err == nil {
			return true
		}
		if ctx.Err() == nil && err.Error() != said {
			k.log.Warn("tried again", "what", what, "err", err)
			said = err.Error()
		}
		if !delay.For(ctx, lookEvery) {
			return false
		}
	}
}

// bootstrap requests the kubelet's client certificate with kubeadm's bootstrap token, unless
// the certificate exists.
func (k *kubelet) bootstrap(ctx context.Context) error {
	if _, err := os.Stat(k.c.root(kubeletConf)); errors.Is(err, fs.ErrNotExist) {
		if err := k.sign(ctx); err != nil {
			return err
		}
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", k.c.root(kubeletConf))
	if err != nil {
		return fmt.Errorf("read the kubelet's credentials: %w", err)
	}
	cfg.QPS, cfg.Burst, cfg.UserAgent = 50, 100, "kubelet-stand-in (simulated)"
	k.client, err = kubernetes.NewForConfig(cfg)
	return err
}

func (k *kubelet) sign(ctx context.Context) error {
	loaded, err := clientcmd.LoadFromFile(k.c.root(bootstrapConf))
	if err != nil {
		return fmt.Errorf("read the bootstrap credentials: %w", err)
	}
	cfg, err := clientcmd.NewDefaultClientConfig(*loaded, nil).ClientConfig()
	if err != nil {
		return fmt.Errorf("read the bootstrap credentials: %w", err)
	}
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject: pkix.Name{CommonName: "system:node:" + k.c.Name, Organization: []string{"system:nodes"}},
	}, key)
	if err != nil {
		return err
	}
	csrs := client.CertificatesV1().CertificateSigningRequests()
	csr, err := csrs.Create(ctx, &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "node-csr-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
			SignerName: certificatesv1.KubeAPIServerClientKubeletSignerName,
			Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("ask for a client certificate: %w", err)
	}
	limit, cancel := context.WithTimeoutCause(ctx, time.Minute, errors.New("nobody signed the kubelet's client certificate within a minute"))
	defer cancel()
	if err := poll(limit, func() (bool, error) {
		got, err := csrs.Get(limit, csr.Name, metav1.GetOptions{})
		if err != nil {
			return false, fmt.Errorf("wait for the client certificate: %w", err)
		}
		for _, cond := range got.Status.Conditions {
			if cond.Type == certificatesv1.CertificateDenied || cond.Type == certificatesv1.CertificateFailed {
				return false, fmt.Errorf("the request for a client certificate was refused: %s", cond.Message)
			}
		}
		csr = got
		return len(got.Status.Certificate) > 0, nil
	}); err != nil {
		return err
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	cluster := loaded.Clusters[loaded.Contexts[loaded.CurrentContext].Cluster]
	return writeKubeconfig(k.c.root(kubeletConf), "system:node:"+k.c.Name, cluster, &clientcmdapi.AuthInfo{
		ClientCertificateData: csr.Status.Certificate, ClientKeyData: pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER}),
	})
}

func writeKubeconfig(path, user string, cluster *clientcmdapi.Cluster, auth *clientcmdapi.AuthInfo) error {
	cfg := clientcmdapi.NewConfig()
	cfg.Clusters["kubernetes"] = &clientcmdapi.Cluster{Server: cluster.Server, CertificateAuthorityData: cluster.CertificateAuthorityData}
	cfg.AuthInfos[user] = auth
	cfg.Contexts[user+"@kubernetes"] = &clientcmdapi.Context{Cluster: "kubernetes", AuthInfo: user}
	cfg.CurrentContext = user + "@kubernetes"
	b, err := clientcmd.Write(*cfg)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return replaceFile(path, b, 0o600)
}

// register creates the Node, which is not Ready yet, and its Lease.
func (k *kubelet) register(ctx context.Context) error {
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: k.c.Name, Labels: map[string]string{
			corev1.LabelHostname: k.c.Name, corev1.LabelOSStable: "linux", corev1.LabelArchStable: runtime.GOARCH,
			"beta.kubernetes.io/os": "linux", "beta.kubernetes.io/arch": runtime.GOARCH,
		}},
		Spec:   corev1.NodeSpec{ProviderID: k.providerID()},
		Status: k.status(false),
	}
	made, err := k.client.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		made, err = k.client.CoreV1().Nodes().Get(ctx, k.c.Name, metav1.GetOptions{})
	}
	if err != nil {
		return fmt.Errorf("register Node %s: %w", k.c.Name, err)
	}
	k.node = made.UID
	lease := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: k.c.Name, Namespace: leaseNamespace, OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "v1", Kind: "Node", Name: k.c.Name, UID: made.UID},
		}},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: &k.c.Name, LeaseDurationSeconds: new(int32(leaseSeconds)), RenewTime: &metav1.MicroTime{Time: time.Now()}},
	}
	if _, err := k.client.CoordinationV1().Leases(leaseNamespace).Create(ctx, lease, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create Lease %s: %w", k.c.Name, err)
	}
	return nil
}

// providerID is the provider ID from kubeadm's configuration, or else from the cloud.
func (k *kubelet) providerID() string {
	b, err := os.ReadFile(k.c.root(flagsFile))
	if err == nil {
		if _, rest, ok := strings.Cut(string(b), "--provider-id="); ok {
			return strings.Trim(strings.Fields(rest)[0], "\"\n")
		}
	}
	return k.c.ProviderID
}

func (k *kubelet) status(ready bool) corev1.NodeStatus {
	now := metav1.Now()
	amounts := corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("4"), corev1.ResourceMemory: resource.MustParse("8Gi"),
		corev1.ResourcePods: resource.MustParse("110"), corev1.ResourceEphemeralStorage: resource.MustParse("50Gi"),
	}
	condition := func(kind corev1.NodeConditionType, is bool, reason, message string) corev1.NodeCondition {
		status := corev1.ConditionFalse
		if is {
			status = corev1.ConditionTrue
		}
		return corev1.NodeCondition{Type: kind, Status: status, Reason: reason, Message: message, LastHeartbeatTime: now, LastTransitionTime: now}
	}
	s := corev1.NodeStatus{
		Capacity: amounts, Allocatable: amounts,
		Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: k.c.IP.String()}, {Type: corev1.NodeHostName, Address: k.c.Name}},
		NodeInfo: corev1.NodeSystemInfo{
			MachineID: k.id("machine"), SystemUUID: k.id("system"), BootID: k.c.bootID(),
			KubeletVersion: k.version, OperatingSystem: "linux", Architecture: runtime.GOARCH,
			OSImage: "simulated machine, image " + k.c.Image.Version, KernelVersion: "none (simulated)", ContainerRuntimeVersion: "simulated://0",
		},
		DaemonEndpoints: corev1.NodeDaemonEndpoints{KubeletEndpoint: corev1.DaemonEndpoint{Port: kubeletPort}},
		Conditions: []corev1.NodeCondition{
			condition(corev1.NodeMemoryPressure, false, "NotMeasured", StandIn+" measures no memory"),
			condition(corev1.NodeDiskPressure, false, "NotMeasured", StandIn+" measures no disk"),
			condition(corev1.NodePIDPressure, false, "NotMeasured", StandIn+" counts no processes"),
			condition(corev1.NodeReady, ready, "KubeletReady", StandIn+" is posting ready status"),
		},
	}
	if !ready {
		s.Conditions[3].Reason, s.Conditions[3].Message = "KubeletNotReady", StandIn+" starts"
	}
	return s
}

func (k *kubelet) id(what string) string { return k.c.id(what) }

// bootID names the present boot of the machine.
func (r record) bootID() string { return r.id(fmt.Sprint("boot", r.Boots)) }

// id derives an identifier from the machine's name that looks like real ones.
func (r record) id(what string) string {
	d := sha256.Sum256([]byte(r.ProviderID + what + r.Created.String()))
	h := hex.EncodeToString(d[:16])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

func (k *kubelet) renew(ctx context.Context) error {
	leases := k.client.CoordinationV1().Leases(leaseNamespace)
	l, err := leases.Get(ctx, k.c.Name, metav1.GetOptions{})
	if err == nil {
		l.Spec.RenewTime = &metav1.MicroTime{Time: time.Now()}
		_, err = leases.Update(ctx, l, metav1.UpdateOptions{})
	}
	if err != nil {
		return fmt.Errorf("renew Lease: %w", err)
	}
	return nil
}

// heartbeat reports the Node's status. Unchanged conditions keep their transition time.
func (k *kubelet) heartbeat(ctx context.Context) error {
	n, err := k.client.CoreV1().Nodes().Get(ctx, k.c.Name, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("read Node: %w", err)
	}
	s := k.status(true)
	for i, c := range s.Conditions {
		for _, old := range n.Status.Conditions {
			if old.Type == c.Type && old.Status == c.Status {
				s.Conditions[i].LastTransitionTime = old.LastTransitionTime
			}
		}
	}
	b, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": n.UID}, "status": s})
	if err == nil {
		_, err = k.client.CoreV1().Nodes().PatchStatus(ctx, k.c.Name, b)
	}
	if err != nil {
		return fmt.Errorf("report Node: %w", err)
	}
	return nil
}

// staticPods runs exactly the pods in the manifest directory.
func (k *kubelet) staticPods(ctx context.Context) error {
	entries, err := os.ReadDir(k.c.root(manifestsDir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read static pods: %w", err)
	}
	wanted := map[string]bool{}
	var errs []error
	if err := k.c.followEncryption(); err != nil {
		errs = append(errs, err)
	}
	for _, e := range entries {
		if e.IsDir() || filepath.Ext(e.Name()) != ".yaml" || strings.HasPrefix(e.Name(), ".") {
			continue
		}
		b, err := os.ReadFile(k.c.root(manifestsDir, e.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue // just moved away
		}
		d := sha256.Sum256(append(b, k.minor()...)) // a kubelet of another minor treats it as another pod, like real ones
		hash := hex.EncodeToString(d[:16])
		m := k.manifests[e.Name()]
		if err == nil && m.hash != hash {
			m = manifest{hash: hash, pod: new(corev1.Pod)}
			err = yaml.UnmarshalStrict(b, m.pod)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("read static pod %s: %w", e.Name(), err))
			continue
		}
		k.manifests[e.Name()] = m
		pod := m.pod
		if pod.Namespace == "" {
			pod.Namespace = metav1.NamespaceDefault
		}
		key := "static/" + pod.Name
		wanted[key] = true
		if w := k.c.pods.get(key); w != nil && w.hash == hash {
			continue
		} else if w != nil {
			k.c.pods.stop(key)
		}
		k.log.Info("static pod started", "pod", pod.Name, "image", pod.Spec.Containers[0].Image)
		k.c.pods.start(key, hash, pod, "", nil, k.c.staticCommand(pod))
		// kubeadm waits for this file.
		if err := replaceFile(k.c.root("run", "static-"+pod.Name), []byte(hash+time.Now().String()), 0o600); err != nil {
			errs = append(errs, err)
		}
	}
	for key := range k.c.pods.list() {
		if strings.HasPrefix(key, "static/") && !wanted[key] {
			k.log.Info("static pod ends", "pod", key)
			k.c.pods.stop(key)
		}
	}
	return errors.Join(errs...)
}

func (k *kubelet) minor() string {
	parts := strings.Split(k.version, ".")
	return strings.Join(parts[:min(2, len(parts))], ".")
}

// sync reconciles each pod of the node.
func (k *kubelet) sync(ctx context.Context) error {
	var errs []error
	seen := map[types.UID]bool{}
	mirrors := map[string]*corev1.Pod{}
	for _, obj := range k.store.List() {
		pod := obj.(*corev1.Pod)
		seen[pod.UID] = true
		if pod.Annotations[mirrorKey] != "" {
			mirrors[pod.Namespace+"/"+pod.Name] = pod
			continue
		}
		if err := k.pod(ctx, pod); err != nil {
			errs = append(errs, fmt.Errorf("pod %s/%s: %w", pod.Namespace, pod.Name, err))
		}
	}
	// Pods that were removed without a deletion event.
	for key, w := range k.c.pods.list() {
		if !strings.HasPrefix(key, "static/") && !seen[w.pod.UID] {
			k.end(w.pod.UID, func() { k.c.pods.stop(key) })
		}
	}
	k.mu.Lock()
	for uid := range k.dead {
		if !seen[uid] {
			delete(k.dead, uid)
			delete(k.ips, uid)
			delete(k.tokens, uid)
		}
	}
	k.mu.Unlock()
	return errors.Join(append(errs, k.mirror(ctx, mirrors))...)
}

// end runs a slow action for a pod, one at a time.
func (k *kubelet) end(uid types.UID, do func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.stopping[uid] {
		return
	}
	k.stopping[uid] = true
	go func() {
		do()
		k.mu.Lock()
		delete(k.stopping, uid)
		k.mu.Unlock()
	}()
}

// pod reconciles a pod of the API.
func (k *kubelet) pod(ctx context.Context, pod *corev1.Pod) error {
	k.mu.Lock()
	over := k.dead[pod.UID] || k.stopping[pod.UID]
	k.mu.Unlock()
	if over {
		return nil
	}
	key := string(pod.UID)
	if pod.DeletionTimestamp != nil {
		k.end(pod.UID, func() {
			k.c.pods.stop(key)
			err := k.client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
				GracePeriodSeconds: new(int64), Preconditions: &metav1.Preconditions{UID: &pod.UID},
			})
			if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
				k.log.Warn("pod not removed", "pod", pod.Name, "err", err)
				return
			}
			k.mu.Lock()
			k.dead[pod.UID] = true
			k.mu.Unlock()
		})
		return nil
	}
	if pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
		return nil
	}
	status, err := k.runPod(ctx, pod)
	if err != nil {
		return err
	}
	return k.report(ctx, pod, status)
}

// runPod starts a pod, if it is one of ours or is to end, and returns its status.
func (k *kubelet) runPod(ctx context.Context, pod *corev1.Pod) (corev1.PodStatus, error) {
	s := corev1.PodStatus{Phase: corev1.PodRunning, StartTime: pod.Status.StartTime, HostIP: k.c.IP.String(), PodIP: k.podIP(pod).String()}
	if s.StartTime == nil {
		now := metav1.Now()
		s.StartTime = &now
	}
	s.HostIPs, s.PodIPs = []corev1.HostIP{{IP: s.HostIP}}, []corev1.PodIP{{IP: s.PodIP}}
	ready, err := k.runContainers(ctx, pod, &s)
	if err != nil {
		return s, err
	}
	initialized := s.Phase != corev1.PodPending
	for _, t := range []corev1.PodConditionType{corev1.PodReadyToStartContainers, corev1.PodInitialized, corev1.ContainersReady, corev1.PodReady, corev1.PodScheduled} {
		c := corev1.PodCondition{Type: t, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now()}
		if !ready && (t == corev1.ContainersReady || t == corev1.PodReady) {
			c.Status, c.Reason = corev1.ConditionFalse, "ContainersNotReady"
		}
		if !initialized && t == corev1.PodInitialized {
			c.Status, c.Reason = corev1.ConditionFalse, "ContainersNotInitialized"
		}
		for _, old := range pod.Status.Conditions {
			if old.Type == c.Type && old.Status == c.Status {
				c.LastTransitionTime = old.LastTransitionTime
			}
		}
		s.Conditions = append(s.Conditions, c)
	}
	return s, nil
}

// runContainers adds the containers to a status, and reports whether all are ready.
func (k *kubelet) runContainers(ctx context.Context, pod *corev1.Pod, s *corev1.PodStatus) (ready bool, err error) {
	errand, all := pod.Spec.RestartPolicy != corev1.RestartPolicyAlways, pod.Spec.Containers
	if errand {
		all = slices.Concat(pod.Spec.InitContainers, all)
	}
	ours := false
	for _, c := range all {
		if !isOurs(c.Image) {
			continue
		}
		if path, _, err := k.c.program(c.Image); err == nil {
			if _, err := os.Stat(path); err != nil {
				return false, fmt.Errorf("image %s: %w", c.Image, err)
			}
		}
		ours = true
	}
	w := k.c.pods.get(string(pod.UID))
	switch {
	case w == nil && !ours && !errand:
		for _, c := range pod.Spec.Containers {
			s.ContainerStatuses = append(s.ContainerStatuses, containerStatus(c, "simulated://"+c.Name, true, true, s.StartTime.Time, 0, ""))
		}
		return true, nil
	case w == nil && errand && cutOff(pod, s):
		return false, nil
	case w == nil && errand:
		w, err = k.startErrand(ctx, pod, ours)
	case w == nil:
		w, err = k.startOurs(ctx, pod)
	case ours:
		err = k.refresh(ctx, pod)
	}
	if err != nil {
		return false, err
	}
	if errand {
		errandStatus(w, s)
		return s.Phase == corev1.PodRunning, nil
	}
	ready = true
	for _, c := range w.containers {
		id, running, ok, started, restarts, last := c.state()
		ready = ready && ok
		s.ContainerStatuses = append(s.ContainerStatuses, containerStatus(*c.spec, id, running, ok, started, restarts, last))
	}
	return ready, nil
}

func containerStatus(c corev1.Container, id string, running, ready bool, started time.Time, restarts int32, last string) corev1.ContainerStatus {
	s := corev1.ContainerStatus{
		Name: c.Name, Image: c.Image, ImageID: "simulated://" + c.Image, ContainerID: id, Ready: ready, Started: &running, RestartCount: restarts,
	}
	if running {
		s.State.Running = &corev1.ContainerStateRunning{StartedAt: metav1.NewTime(started.Truncate(time.Second))}
	} else {
		s.State.Waiting = &corev1.ContainerStateWaiting{Reason: "ContainerCreating"}
		if last != "" {
			s.State.Waiting = &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff", Message: last}
		}
	}
	return s
}

// podIP is the machine's address or one of its pod range, which is not reachable.
func (k *kubelet) podIP(pod *corev1.Pod) netip.Addr {
	if pod.Spec.HostNetwork {
		return k.c.IP
	}
	if a, err := netip.ParseAddr(pod.Status.PodIP); err == nil && k.c.PodCIDR.Contains(a) {
		return a
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if a, ok := k.ips[pod.UID]; ok {
		return a
	}
	used := map[netip.Addr]bool{}
	for _, a := range k.ips {
		used[a] = true
	}
	for _, obj := range k.store.List() {
		if a, err := netip.ParseAddr(obj.(*corev1.Pod).Status.PodIP); err == nil {
			used[a] = true
		}
	}
	a := k.c.PodCIDR.Addr().Next().Next()
	for used[a] {
		a = a.Next()
	}
	k.ips[pod.UID] = a
	return a
}

// report updates the status of a pod if it has changed.
func (k *kubelet) report(ctx context.Context, pod *corev1.Pod, s corev1.PodStatus) error {
	old := pod.Status
	if old.Phase == s.Phase && old.PodIP == s.PodIP && reflect.DeepEqual(ready(old), ready(s)) && reflect.DeepEqual(states(old), states(s)) {
		return nil
	}
	b, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": pod.UID}, "status": s})
	if err == nil {
		_, err = k.client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, b, metav1.PatchOptions{}, "status")
	}
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("report: %w", err)
	}
	return nil
}

func ready(s corev1.PodStatus) bool {
	for _, c := range s.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// states summarizes the states of containers, without times.
func states(s corev1.PodStatus) (out []string) {
	for _, c := range slices.Concat(s.InitContainerStatuses, s.ContainerStatuses) {
		why := ""
		if c.State.Waiting != nil {
			why = c.State.Waiting.Reason
		}
		out = append(out, fmt.Sprint(c.Name, c.Image, c.Ready, c.RestartCount, c.State.Running != nil, c.State.Terminated != nil, why))
	}
	return out
}

// mirror creates mirror pods for static pods, and deletes obsolete ones.
func (k *kubelet) mirror(ctx context.Context, there map[string]*corev1.Pod) error {
	var errs []error
	wanted := map[string]bool{}
	for key, w := range k.c.pods.list() {
		if !strings.HasPrefix(key, "static/") {
			continue
		}
		name := w.pod.Name + "-" + k.c.Name
		id := w.pod.Namespace + "/" + name
		wanted[id] = true
		m := there[id]
		if m != nil && (m.DeletionTimestamp != nil || m.Annotations[mirrorKey] != w.hash) {
			if err := k.unmirror(ctx, m); err != nil {
				errs = append(errs, err)
			}
			continue
		}
		if m == nil {
			p := w.pod.DeepCopy()
			p.Name, p.Spec.NodeName = name, k.c.Name
			if p.Annotations == nil {
				p.Annotations = map[string]string{}
			}
			p.Annotations[mirrorKey], p.Annotations["kubernetes.io/config.hash"] = w.hash, w.hash
			p.Annotations["kubernetes.io/config.source"] = "file"
			p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: k.c.Name, UID: k.node, Controller: new(true)}}
			p.Spec.Tolerations = append(p.Spec.Tolerations, corev1.Toleration{Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute})
			if _, err := k.client.CoreV1().Pods(p.Namespace).Create(ctx, p, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
				errs = append(errs, fmt.Errorf("show static pod %s: %w", w.pod.Name, err))
			}
			continue
		}
		now := metav1.Now()
		s := corev1.PodStatus{
			Phase: corev1.PodRunning, StartTime: m.Status.StartTime, HostIP: k.c.IP.String(), PodIP: k.c.IP.String(),
			HostIPs: []corev1.HostIP{{IP: k.c.IP.String()}}, PodIPs: []corev1.PodIP{{IP: k.c.IP.String()}},
		}
		if s.StartTime == nil {
			s.StartTime = &now
		}
		all := corev1.ConditionTrue
		for _, c := range w.containers {
			id, running, ok, started, restarts, last := c.state()
			if !ok {
				all = corev1.ConditionFalse
			}
			s.ContainerStatuses = append(s.ContainerStatuses, containerStatus(*c.spec, id, running, ok, started, restarts, last))
		}
		for _, t := range []corev1.PodConditionType{corev1.ContainersReady, corev1.PodReady} {
			s.Conditions = append(s.Conditions, corev1.PodCondition{Type: t, Status: all, LastTransitionTime: now})
		}
		s.Conditions = append(s.Conditions, corev1.PodCondition{Type: corev1.PodInitialized, Status: corev1.ConditionTrue, LastTransitionTime: now})
		if err := k.report(ctx, m, s); err != nil {
			errs = append(errs, err)
		}
	}
	for id, m := range there {
		if !wanted[id] {
			if err := k.unmirror(ctx, m); err != nil {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

func (k *kubelet) unmirror(ctx context.Context, m *corev1.Pod) error {
	err := k.client.CoreV1().Pods(m.Namespace).Delete(ctx, m.Name, metav1.DeleteOptions{
		GracePeriodSeconds: new(int64), Preconditions: &metav1.Preconditions{UID: &m.UID},
	})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("take mirror of static pod %s away: %w", m.Name, err)
	}
	return nil
}

// serve serves the health checks, and the kubelet's API.
func (k *kubelet) serve(ctx context.Context) {
	health := http.NewServeMux()
	health.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") })
	var wg sync.WaitGroup
	wg.Go(func() {
		k.retry(ctx, "health", func(ctx context.Context) error {
			return serveOn(ctx, net.JoinHostPort(k.c.IP.String(), kubeletHealthPort), health, nil)
		})
	})
	wg.Go(func() { k.retry(ctx, "server", k.serveAPI) })
	wg.Wait()
}
