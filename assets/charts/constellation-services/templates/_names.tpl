{{- define "services.labels" -}}
app.kubernetes.io/name: joinservice
app.kubernetes.io/part-of: constellation
app.kubernetes.io/version: {{ .Values.release | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "services.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
