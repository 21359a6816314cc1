#!/bin/sh
# Makes a certificate for a node of a Ray cluster: ray-certificate.sh CA_DIRECTORY DIRECTORY NAME...
# The first directory has ca.crt and ca.key; the second gets tls.crt, tls.key and ca.crt. Names are host names and IP addresses.
set -eu
authority=$1 directory=$2
shift 2
names=DNS:localhost,IP:127.0.0.1
for name in "$@"; do
  case $name in
    *[!0-9.]*) names=$names,DNS:$name ;;
    *) names=$names,IP:$name ;;
  esac
done
umask 077
openssl req -new -newkey rsa:2048 -nodes -subj /CN=ray -keyout "$directory/tls.key" -out "$directory/request.pem"
printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth\n' "$names" > "$directory/extensions"
openssl x509 -req -days 365 -in "$directory/request.pem" -extfile "$directory/extensions" \
  -CA "$authority/ca.crt" -CAkey "$authority/ca.key" -set_serial "0x$(openssl rand -hex 16)" -out "$directory/tls.crt"
cp "$authority/ca.crt" "$directory/ca.crt"
rm "$directory/request.pem" "$directory/extensions"
