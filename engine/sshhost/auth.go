package sshhost

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"

	"constellation/engine/plan"
)

// login is what one target is offered to log in.
type login struct {
	o       *Options
	signers []ssh.Signer
	notes   []string      // why some key was not offered
	err     error         // why an accepted key did not sign
	pause   func() func() // stops the time limit of the login while the user types
	agent   net.Conn
}

func (l *login) close() {
	if l.agent != nil {
		_ = l.agent.Close()
	}
}

// logins returns what a target is offered. The caller closes it.
func (o *Options) login(ctx context.Context, t Target) (*login, error) {
	l := &login{o: o, pause: func() func() { return func() {} }}
	var held []ssh.Signer
	if o.Agent != "" {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "unix", o.Agent)
		if err == nil {
			l.agent = conn
			stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
			held, err = agent.NewClient(conn).Signers()
			stop()
		}
		if err != nil {
			l.notes = append(l.notes, "the agent of SSH_AUTH_SOCK does not answer")
		}
	}
	if t.KeyFile != "" {
		if err := l.addFile(ctx, t.KeyFile, held, true); err != nil {
			l.close()
			return nil, err
		}
		return l, nil
	}
	l.signers = held
	for _, name := range o.Keys {
		if err := l.addFile(ctx, name, held, false); err != nil && !errors.Is(err, fs.ErrNotExist) {
			l.notes = append(l.notes, name+" was not offered: "+err.Error())
		}
	}
	if len(l.signers) == 0 {
		l.close()
		return nil, &plan.Error{Op: "log in as " + t.String(), Err: fmt.Errorf("there is no key to log in with%s", l.remarks()), Remedy: "name a key file with --key, or add a key to the agent with `ssh-add`"}
	}
	return l, nil
}

func (l *login) remarks() (out string) {
	for _, n := range l.notes {
		out += "; " + n
	}
	return out
}

// addFile adds the key of a file, and the certificate beside it. held are the keys of the agent.
func (l *login) addFile(ctx context.Context, name string, held []ssh.Signer, wanted bool) error {
	op := "read key " + name
	b, err := readKey(name)
	if err != nil {
		return &plan.Error{Op: op, Err: err, Remedy: "name a private key in OpenSSH or PEM format", Exit: plan.ExitUsage}
	}
	public := readPublic(name + ".pub")
	if pub, _, _, _, err := ssh.ParseAuthorizedKey(b); err == nil {
		public = pub // the private key is in the agent alone
		if inAgent(held, pub) == nil {
			return &plan.Error{Op: op, Err: errors.New("it is a public key, and the agent does not hold its private key"), Remedy: "name the private key, or add it to the agent with `ssh-add`", Exit: plan.ExitUsage}
		}
	} else {
		signer, err := ssh.ParsePrivateKey(b)
		var encrypted *ssh.PassphraseMissingError
		switch {
		case err == nil:
			l.add(signer, name)
			return nil
		case !errors.As(err, &encrypted):
			return &plan.Error{Op: op, Err: errors.New("it contains no private key that can be used"), Remedy: "name a private key in OpenSSH or PEM format", Exit: plan.ExitUsage}
		case encrypted.PublicKey != nil:
			public = encrypted.PublicKey
		}
	}
	if public != nil {
		if s := inAgent(held, public); s != nil {
			if wanted {
				l.add(s, name)
			}
			return nil // else it is offered already
		}
		// The passphrase is not needed before the machine accepts the key.
		l.add(&encryptedKey{login: l, ctx: ctx, name: name, pem: b, public: public}, name)
		return nil
	}
	signer, err := l.decrypt(ctx, name, b)
	if err != nil {
		return err
	}
	l.add(signer, name)
	return nil
}

// readKey reads a small file.
func readKey(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, 64<<10))
	if err != nil {
		return nil, err
	}
	return b, nil
}

func readPublic(name string) ssh.PublicKey {
	b, err := readKey(name)
	if err != nil {
		return nil
	}
	pub, _, _, _, err := ssh.ParseAuthorizedKey(b)
	if err != nil {
		return nil
	}
	return pub
}

func inAgent(held []ssh.Signer, pub ssh.PublicKey) ssh.Signer {
	for _, s := range held {
		if bytes.Equal(s.PublicKey().Marshal(), pub.Marshal()) {
			return s
		}
	}
	return nil
}

// add offers a key, after the certificate that is beside its file.
func (l *login) add(s ssh.Signer, name string) {
	if cert, is := readPublic(name + "-cert.pub").(*ssh.Certificate); is {
		if c, err := ssh.NewCertSigner(cert, s); err != nil {
			l.notes = append(l.notes, name+"-cert.pub is not the certificate of this key")
		} else {
			if now := time.Now(); cert.ValidBefore != ssh.CertTimeInfinity && now.After(time.Unix(int64(cert.ValidBefore), 0)) {
				l.notes = append(l.notes, name+"-cert.pub ended on "+time.Unix(int64(cert.ValidBefore), 0).UTC().Format("2006-01-02"))
			}
			l.signers = append(l.signers, c)
		}
	}
	l.signers = append(l.signers, s)
}

// decrypt gets the passphrase of a key and decrypts it.
func (l *login) decrypt(ctx context.Context, name string, pem []byte) (ssh.Signer, error) {
	op := "decrypt key " + name
	if l.o.Passphrase == nil {
		return nil, &plan.Error{Op: op, Err: fmt.Errorf("%w, and no passphrase was given", ErrPassphrase), Remedy: "add it to the agent with `ssh-add " + quote(name) + "`, or run the command on a terminal, which prompts"}
	}
	goOn := l.pause()
	pass, err := l.o.Passphrase(ctx, name)
	goOn()
	if err != nil {
		return nil, &plan.Error{Op: op, Err: err}
	}
	defer clear(pass)
	signer, err := ssh.ParsePrivateKeyWithPassphrase(pem, pass)
	if errors.Is(err, x509.IncorrectPasswordError) {
		return nil, &plan.Error{Op: op, Err: fmt.Errorf("%w, and the passphrase is wrong", ErrPassphrase), Remedy: "run the command again with the right passphrase"}
	}
	if err != nil {
		return nil, &plan.Error{Op: op, Err: errors.New("it contains no private key that can be used"), Remedy: "name a private key in OpenSSH or PEM format"}
	}
	return signer, nil
}

// encryptedKey is a key that is decrypted when a machine accepts it.
type encryptedKey struct {
	login  *login
	ctx    context.Context
	name   string
	pem    []byte
	public ssh.PublicKey
	signer ssh.Signer
}

// PublicKey implements [ssh.Signer].
func (k *encryptedKey) PublicKey() ssh.PublicKey { return k.public }

// Sign implements [ssh.Signer].
func (k *encryptedKey) Sign(rand io.Reader, data []byte) (*ssh.Signature, error) {
	return k.SignWithAlgorithm(rand, data, "")
}

// SignWithAlgorithm implements [ssh.AlgorithmSigner].
func (k *encryptedKey) SignWithAlgorithm(rand io.Reader, data []byte, algorithm string) (*ssh.Signature, error) {
	if k.signer == nil {
		s, err := k.login.decrypt(k.ctx, k.name, k.pem)
		if err != nil {
			k.login.err = err
			return nil, err
		}
		k.signer = s
	}
	if s, is := k.signer.(ssh.AlgorithmSigner); is && algorithm != "" {
		return s.SignWithAlgorithm(rand, data, algorithm)
	}
	return k.signer.Sign(rand, data)
}
