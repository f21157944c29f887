package joinservice

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/client-go/rest"

	"constellation/engine/attestation"
	"constellation/engine/attestation/attestationtest"
	"constellation/engine/cloud"
	"constellation/engine/cloud/sandboxapi"
	"constellation/joinservice/joinproto"
)

const joiners = 1000

// BenchmarkTickets measures a thousand machines with software quotes that request tickets from
// one join service, which runs in a process of its own and writes to a real API server. In
// "spread" the machines boot over five seconds, like machines that a cloud starts together. In
// "burst", the worst case, all boot at the same instant. The time of a machine starts with its
// first request and includes all retries. A machine without a ticket ends the benchmark.
func BenchmarkTickets(b *testing.B) {
	for _, mode := range []struct {
		name  string
		boots time.Duration
	}{
		{"spread", 5 * time.Second},
		{"burst", 0},
	} {
		b.Run(mode.name, func(b *testing.B) {
			s := newSite(b)
			sky := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				switch r.URL.Path {
				case "/v1/peers":
					list, _ := s.sky.Peers(r.Context())
					_ = json.NewEncoder(w).Encode(sandboxapi.Peers{Instances: list})
				case "/v1/loadbalancer":
					_ = json.NewEncoder(w).Encode(sandboxapi.LoadBalancer{Host: "10.42.0.1"})
				default:
					http.NotFound(w, r)
				}
			}))
			defer sky.Close()
			self, _ := s.machine("control-plane-0", cloud.ControlPlane, goodBoot, clusterID)
			server := startServer(b, s, sky.URL, self)
			// The API server delays the first object of a new kind by two seconds.
			id, issuer := s.machine("worker", cloud.Worker, goodBoot, nil)
			if err := (&joinerMachine{id: id, issuer: issuer, key: p256(b)}).join(s, server.addr); err != nil {
				b.Fatal(err)
			}
			for n := 0; b.Loop(); n++ {
				b.StopTimer()
				all := make([]*joinerMachine, joiners)
				for i := range all {
					id, issuer := s.machine(fmt.Sprintf("worker-%d-%d", n, i), cloud.Worker, goodBoot, nil)
					all[i] = &joinerMachine{id: id, issuer: issuer, key: p256(b)}
				}
				parts := map[string]int{"joinservice": server.pid, "kube-apiserver": s.cp.PID("kube-apiserver"), "etcd": s.cp.PID("etcd"), "joiners": os.Getpid()}
				before := map[string]time.Duration{}
				for name, pid := range parts {
					before[name] = cpu(b, pid)
				}
				b.StartTimer()
				start := time.Now()
				var wg sync.WaitGroup
				for _, m := range all {
					wg.Go(func() {
						time.Sleep(rand.N(mode.boots + 1))
						m.err = m.join(s, server.addr)
					})
				}
				wg.Wait()
				total := time.Since(start)
				var took []time.Duration
				retries := 0
				for _, m := range all {
					if m.err != nil {
						b.Fatalf("%s: %v", m.id.Name, m.err)
					}
					took = append(took, m.took)
					retries += m.retries
				}
				slices.Sort(took)
				p50, p99 := took[joiners/2], took[joiners*99/100]
				memory := server.peak(b)
				b.ReportMetric(total.Seconds(), "s-total")
				b.ReportMetric(float64(p50.Milliseconds()), "ms-p50")
				b.ReportMetric(float64(p99.Milliseconds()), "ms-p99")
				b.ReportMetric(float64(memory)/1e6, "MB-server")
				b.ReportMetric(float64(retries), "retries")
				for name, pid := range parts {
					b.ReportMetric(float64((cpu(b, pid)-before[name]).Microseconds())/joiners, "cpu-µs/ticket-"+name)
				}
			}
		})
	}
}

// joinerMachine is one machine that joins.
type joinerMachine struct {
	id      attestation.Identity
	issuer  attestation.Issuer
	key     *ecdsa.PrivateKey
	from    netip.Addr // local address; the zero value: any
	took    time.Duration
	retries int
	err     error
}

// join requests a ticket until it gets one, and reports the join done, as a machine does.
func (m *joinerMachine) join(s *site, addr string) error {
	start := time.Now()
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(s.credentials(m.issuer)), grpc.WithReadBufferSize(bufferSize), grpc.WithWriteBufferSize(bufferSize),
	}
	if m.from.IsValid() {
		d := net.Dialer{Timeout: 3 * time.Second, LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(m.from, 0))}
		options = append(options, grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			return d.DialContext(ctx, "tcp", addr)
		}))
	}
	conn, err := grpc.NewClient("passthrough:///"+addr, options...)
	if err != nil {
		return err
	}
	defer conn.Close()
	c := joinproto.NewJoinServiceClient(conn)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	req := &joinproto.IssueJoinTicketRequest{CertificateRequest: csr(s.t, m.id, m.key, nil)}
	for {
		t, err := c.IssueJoinTicket(ctx, req)
		if err == nil {
			m.took = time.Since(start)
			if t.GetToken() == "" || len(t.GetKubeletCertificate()) == 0 {
				return errors.New("half a ticket")
			}
			break
		}
		wait, ok := comeBack(err)
		if !ok {
			return err
		}
		m.retries++
		time.Sleep(wait)
	}
	stream, err := c.Report(ctx)
	if err != nil {
		return err
	}
	for _, step := range []string{"claim-node", "install-components"} {
		if err := stream.Send(&joinproto.ReportRequest{Step: step, State: "done"}); err != nil {
			return err
		}
	}
	_, err = stream.CloseAndRecv()
	return err
}

func comeBack(err error) (time.Duration, bool) {
	for _, d := range status.Convert(err).Details() {
		if r, ok := d.(*errdetails.RetryInfo); ok {
			return r.GetRetryDelay().AsDuration(), true
		}
	}
	// A busy server closes slow connections. A machine then connects again, as after every
	// failure.
	return time.Second, status.Code(err) == codes.Unavailable
}

// serverProcess is a join service in a process of its own, for its memory.
type serverProcess struct {
	addr string
	pid  int
}

// serverEnv carries serverConfig to the process that TestBenchServer becomes.
const serverEnv = "JOINSERVICE_BENCH_SERVER"

type serverConfig struct {
	Host, Metadata, PKI     string
	Self                    attestation.Identity
	CloudCert, CloudKey     string
	CertData, KeyData, Root []byte
}

func startServer(b *testing.B, s *site, sky string, self attestation.Identity) *serverProcess {
	b.Helper()
	access := s.access()
	cfg, err := json.Marshal(serverConfig{
		Host: access.Host, CertData: access.CertData, KeyData: access.KeyData, Root: access.CAData,
		Metadata: sky, PKI: s.cp.PKI(), Self: self, CloudCert: s.roots, CloudKey: s.caKey,
	})
	if err != nil {
		b.Fatal(err)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestBenchServer$", "-test.timeout=10m")
	// As in the chart.
	cmd.Env = append(os.Environ(), "GOMEMLIMIT=200MiB", serverEnv+"="+string(cfg))
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		in.Close()
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		b.Fatalf("start join service: %v", err)
	}
	return &serverProcess{addr: strings.TrimSpace(line), pid: cmd.Process.Pid}
}

// peak returns the peak resident memory of the process, in bytes.
func (p *serverProcess) peak(b *testing.B) int64 {
	b.Helper()
	f, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.pid))
	if err != nil {
		b.Skipf("memory of a process is read from /proc: %v", err)
	}
	for line := range strings.Lines(string(f)) {
		if v, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kB, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(v), "kB")), 10, 64)
			if err != nil {
				b.Fatal(err)
			}
			return kB << 10
		}
	}
	b.Fatal("no VmHWM")
	return 0
}

// cpu returns the processor time of a process.
func cpu(b *testing.B, pid int) time.Duration {
	b.Helper()
	f, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		b.Skipf("processor time of a process is read from /proc: %v", err)
	}
	// The name in parentheses may hold spaces; user and system time are the 14th and 15th field.
	fields := strings.Fields(string(f[strings.LastIndexByte(string(f), ')')+1:]))
	var ticks int64
	for _, v := range fields[11:13] {
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil {
			b.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * (time.Second / 100)
}

// TestBenchServer is the process that BenchmarkTickets starts; alone it does nothing.
// It ends when its standard input does.
func TestBenchServer(t *testing.T) {
	env := os.Getenv(serverEnv)
	if env == "" {
		t.Skip("started by BenchmarkTickets")
	}
	var c serverConfig
	if err := json.Unmarshal([]byte(env), &c); err != nil {
		t.Fatal(err)
	}
	access := &rest.Config{Host: c.Host, TLSClientConfig: rest.TLSClientConfig{CAData: c.Root, CertData: c.CertData, KeyData: c.KeyData}}
	ca, err := attestationtest.ParseCA([]byte(c.CloudCert), []byte(c.CloudKey))
	if err != nil {
		t.Fatal(err)
	}
	issuer, err := attestationtest.NewSoftwareIssuer(ca, c.Self, goodBoot, clusterID)
	if err != nil {
		t.Fatal(err)
	}
	both := Access{
		Cluster: access, Namespace: namespace, Metadata: sandboxapi.NewMetadata(c.Metadata), Attestation: attestation.TPMMethod(),
		Log: slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	}
	socket, _ := runSigner(t, SignerConfig{Access: both, Issuer: issuer, PKI: c.PKI, APIServerPort: 6443})
	s, err := New(Config{Access: both, Signer: socket, APIServerPort: 6443})
	if err != nil {
		t.Fatal(err)
	}
	join, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	health, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		for _, err := os.Stdin.Read(make([]byte, 1)); err == nil; {
			_, err = os.Stdin.Read(make([]byte, 1))
		}
		cancel()
	}()
	go func() {
		for s.snapshot.Load() == nil {
			time.Sleep(10 * time.Millisecond)
		}
		fmt.Println(join.Addr())
	}()
	if err := s.Run(ctx, join, health); err != nil {
		t.Fatal(err)
	}
}
