// Command protogen writes the Go code of .proto files beside them. Its arguments are the folders of the files, relative to the root of the
// tree, which is the working directory. It compiles the files by itself and runs the plugins protoc-gen-go and protoc-gen-go-grpc of a folder.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/bufbuild/protocompile"
	"github.com/bufbuild/protocompile/linker"
	"github.com/bufbuild/protocompile/protoutil"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/pluginpb"
)

func main() {
	plugins := flag.String("plugins", "", "`folder` of the plugins")
	flag.Parse()
	if err := generate(context.Background(), *plugins, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "protogen:", err)
		os.Exit(1)
	}
}

func generate(ctx context.Context, plugins string, folders []string) error {
	var names []string
	for _, folder := range folders {
		found, err := filepath.Glob(filepath.Join(folder, "*.proto"))
		if err != nil {
			return fmt.Errorf("list files of %s: %w", folder, err)
		}
		if len(found) == 0 {
			return fmt.Errorf("folder %s has no .proto file", folder)
		}
		names = append(names, found...)
	}
	c := protocompile.Compiler{Resolver: protocompile.WithStandardImports(&protocompile.SourceResolver{}), SourceInfoMode: protocompile.SourceInfoStandard}
	files, err := c.Compile(ctx, names...)
	if err != nil {
		return fmt.Errorf("compile: %w", err)
	}
	request := &pluginpb.CodeGeneratorRequest{FileToGenerate: names, Parameter: proto.String("paths=source_relative"), ProtoFile: withImports(files)}
	for _, name := range []string{"protoc-gen-go", "protoc-gen-go-grpc"} {
		if err := run(ctx, filepath.Join(plugins, name), request); err != nil {
			return fmt.Errorf("run %s: %w", name, err)
		}
	}
	return nil
}

// withImports returns files and all that they import. Each comes after its imports, as plugins require.
func withImports(files linker.Files) (all []*descriptorpb.FileDescriptorProto) {
	seen := map[string]bool{}
	var add func(protoreflect.FileDescriptor)
	add = func(f protoreflect.FileDescriptor) {
		if seen[f.Path()] {
			return
		}
		seen[f.Path()] = true
		for i := range f.Imports().Len() {
			add(f.Imports().Get(i).FileDescriptor)
		}
		all = append(all, protoutil.ProtoFromFileDescriptor(f))
	}
	for _, f := range files {
		add(f)
	}
	return all
}

// run sends a request to a plugin and writes the files of its answer.
func run(ctx context.Context, plugin string, request proto.Message) error {
	in, err := proto.Marshal(request)
	if err != nil {
		return fmt.Errorf("marshal request: %w", err)
	}
	cmd := exec.CommandContext(ctx, plugin)
	cmd.Stdin, cmd.Stderr = bytes.NewReader(in), os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return err
	}
	var answer pluginpb.CodeGeneratorResponse
	if err := proto.Unmarshal(out, &answer); err != nil {
		return fmt.Errorf("unmarshal answer: %w", err)
	}
	if answer.Error != nil {
		return errors.New(answer.GetError())
	}
	for _, f := range answer.GetFile() {
		if err := os.WriteFile(f.GetName(), []byte(f.GetContent()), 0o644); err != nil {
			return err
		}
	}
	return nil
}
